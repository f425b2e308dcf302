"""What happens to samples on their way: random numbers, collation, and what is kept of a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, default_collate

from planner.errors import ModelError
from planner.language.graph.batch import flatten_batch, like, unflatten_batch
from planner.runtime.batches.draws import draw_from, generators_kept
from planner.runtime.batches.inputs.agreement import marks_of
from planner.runtime.batches.inputs.feed import filled


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A replica's part as its loader hands it to the rank.

    Attributes:
        batch: in the user's structure, None for tensors that the rank does not read.
        marks: checksums of all its tensors, those not read among them (`agreement.marks_of`).
        whole: samples (units of them) of the whole batch; None where replicas read shards of their
            own.
        order: a checksum of which samples of the dataset these are; None of a stream.
        has_ended: of what goes round again at its end, whether it has come round once.
        progress: samples read of each shard that this part was made of.
        worker: which of the loader's workers has made it.
    """

    batch: Any
    marks: Mapping[str, int]
    whole: int | None = None
    order: int | None = None
    has_ended: bool = False
    progress: Mapping[int, int] = field(default_factory=dict)
    worker: int = 0

    def pin_memory(self) -> Loaded:
        """Return it in pinned memory; a DataLoader calls this."""
        leaves, tree = flatten_batch(self.batch)
        pinned = {path: tensor.pin_memory() for path, tensor in leaves.items()}
        return replace(self, batch=unflatten_batch(tree, pinned))


@dataclass(frozen=True, kw_only=True)
class Collate:
    """Makes a part of samples, in the worker: what the rank does not read goes no farther.

    Attributes:
        make: from a list of samples to a batch; None for torch's own, or `fill_up`.
        reads: paths of the tensors to keep.
        pad: what samples of different shapes are filled up with, by path.
    """

    make: Callable[[list[Any]], Any] | None
    reads: frozenset[str]
    pad: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, samples: list[Any]) -> Loaded:
        """Return the part of some samples."""
        if self.make is not None:
            batch = self.make(samples)
        else:
            batch = fill_up(samples, self.pad) if self.pad else default_collate(samples)
        leaves, tree = flatten_batch(batch)
        kept = {path: leaf if path in self.reads else None for path, leaf in leaves.items()}
        return Loaded(batch=unflatten_batch(tree, kept), marks=marks_of(leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """Which samples a part is made of.

    Attributes:
        epoch: the pass.
        whole: samples (units of them) of the whole batch.
        order: a checksum of which samples of the dataset these are.
        places: of the part's samples in the pass.
        numbers: theirs in the dataset.
    """

    epoch: int
    whole: int
    order: int
    places: Sequence[int]
    numbers: Sequence[Any]


class MapParts(Dataset[Loaded]):
    """A map-style dataset read by part, its random numbers drawn from each sample's place."""

    def __init__(self, dataset: Any, seed: int, collate: Collate) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate

    def __getitem__(self, key: PartKey) -> Loaded:
        """Return a part."""
        with generators_kept():
            samples = self._read(key)
            # A collate_fn may draw, too: masks of language models.
            draw_from(self._seed, key.epoch, key.places[0], len(key.places))
            return replace(self._collate(samples), whole=key.whole, order=key.order)

    def _read(self, key: PartKey) -> list[Any]:
        if _reads_together(self._dataset):  # `datasets` is many times as fast so
            draw_from(self._seed, key.epoch, key.places[0])
            return list(self._dataset.__getitems__(key.numbers))
        samples = []
        for place, number in zip(key.places, key.numbers, strict=True):
            draw_from(self._seed, key.epoch, place)
            samples.append(self._dataset[number])
        return samples


def _reads_together(dataset: Any) -> bool:
    """Whether a dataset reads several samples at once: a Subset only says so for what it is of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def fill_up(samples: Sequence[Any], pad: Mapping[str, float]) -> Any:
    """Return samples as a batch, each tensor filled up to the largest of them.

    Lists of numbers are taken as tensors. Raises ModelError for one of several shapes for which
    `pad` has no value.
    """
    flat = [flatten_batch(_as_tensors(sample)) for sample in samples]
    leaves = {}
    for each, _ in flat:
        if each.keys() != flat[0][0].keys():
            apart = ", ".join(sorted(each.keys() ^ flat[0][0].keys()))
            raise ModelError(f"some samples have {apart} and others do not; give all the same")
    for path in flat[0][0]:
        tensors = [each[path] for each, _ in flat]
        if len({t.dim() for t in tensors}) > 1:
            raise ModelError(f"samples have {path} of several numbers of dims; give all the same")
        shape = tuple(max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True))
        if path not in pad and any(tuple(t.shape) != shape for t in tensors):
            raise ModelError(
                f"samples have {path} of several shapes, such as {tuple(tensors[0].shape)} and "
                f"{shape}; planner.apply(..., pad=) says what to fill it up with"
            )
        leaves[path] = torch.stack([filled(t, shape, pad.get(path, 0)) for t in tensors])
    return unflatten_batch(flat[0][1], leaves)


def _as_tensors(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return like(sample, [_as_tensors(value) for value in sample.values()])
    if isinstance(sample, tuple):
        return like(sample, [_as_tensors(value) for value in sample])
    return sample if sample is None or isinstance(sample, str) else torch.as_tensor(sample)


def as_it_is(part: Loaded) -> Loaded:
    """Return what a dataset of parts gives: a DataLoader has nothing to collate."""
    return part
