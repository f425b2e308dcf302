"""Data that can only be read from front to back: iterables, and streams of shards.

An iterable is read by every rank that needs it, and a rank keeps its own samples: sample i of the
data is sample i of the passes of any plan. A stream that says its `num_shards`, and can be asked
for one (`datasets`, and what is written like it), is read by shards: shard s goes to replica s
modulo their number, which reads nothing else. How many samples were read of each shard is the
position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from planner.errors import ModelError
from planner.language.graph.batch_split import BatchSplit
from planner.language.graph.unit import SAMPLE, Unit
from planner.runtime.batches.draws import draw_from, generators_kept
from planner.runtime.batches.order import AtEnd
from planner.runtime.batches.samples import Collate, Loaded


class WholeStream(IterableDataset[Loaded]):
    """The parts of one replica of an iterable that is read whole."""

    def __init__(
        self,
        data: Any,
        *,
        collate: Collate,
        split: BatchSplit,
        least: int,
        replicas: tuple[int, int],
        at_end: AtEnd,
        seed: int,
        epoch: int,
        start: int,
        together: Unit = SAMPLE,
    ) -> None:
        """`split` is that of a whole batch, of units of samples that belong `together`, `least` the
        samples of the smallest that can be trained on; `replicas` says how many parts a batch has,
        and which this is. `epoch` and `start` are the pass, and the sample in it to begin with.
        """
        self._data, self._collate, self._split, self._least = data, collate, split, least
        self._replicas, self._at_end, self._seed = replicas, at_end, seed
        self._epoch, self._start, self._together = epoch, start, together

    def __iter__(self) -> Iterator[Loaded]:
        """Yield the parts that this worker makes: all read the data, each collates its turns."""
        return _undisturbed(self._parts())

    def _parts(self) -> Iterator[Loaded]:
        turn, turns = _own_turn()
        for number, (first, samples) in enumerate(self._batches()):
            # Workers read the same stream and deal the batches, as a stream cannot be entered in
            # the middle.
            if number % turns != turn:
                continue
            split = self._split.resized(len(samples) // self._together.size)
            own = places_of(split, *self._replicas, self._together)
            draw_from(self._seed, self._epoch, first, len(own))
            part = self._collate([samples[place] for place in own])
            yield replace(part, whole=split.num_samples)

    def _batches(self) -> Iterator[tuple[int, list[Any]]]:
        size = self._split.num_samples * self._together.size
        # (Of a batch that is whole for certain, the samples of others need not be kept.)
        own = frozenset(places_of(self._split, *self._replicas, self._together))
        keeps_all = self._at_end == "short"
        samples: list[Any] = []
        first = self._start
        for sample in read(self._data, self._seed, self._epoch, 0, skip=self._start):
            samples.append(sample if keeps_all or len(samples) in own else None)
            if len(samples) == size:
                yield first, samples
                first += size
                samples = []
        if first == 0 and not samples:
            raise ModelError("the data gave no sample; a loader needs some")
        if not samples or self._at_end == "drop":
            return
        if self._at_end == "short":
            if len(samples) % self._together.size:
                raise ModelError(
                    f"the data end with a batch of {len(samples)} samples, and "
                    f"{self._together.size} belong together; choose at_end='wrap' or 'drop'"
                )
            if len(samples) >= self._least:
                yield first, samples
            return
        while len(samples) < size:
            for sample in read(self._data, self._seed, self._epoch, 0):
                samples.append(sample)
                if len(samples) == size:
                    break
        yield first, samples


class ShardedStream(IterableDataset[Loaded]):
    """The parts of one replica of a stream, from the shards that are its own."""

    def __init__(
        self,
        data: Any,
        *,
        collate: Collate,
        num_shards: int,
        samples: int,
        least: int,
        replicas: tuple[int, int],
        at_end: AtEnd,
        seed: int,
        epoch: int,
        progress: Mapping[int, int],
    ) -> None:
        """`samples` are those of a part, `least` those of the smallest; `progress` says how many
        were read of each shard.
        """
        self._data, self._collate, self._num_shards = data, collate, num_shards
        self._samples, self._least, self._replicas = samples, least, replicas
        self._at_end, self._seed, self._epoch = at_end, seed, epoch
        self._progress = dict(progress)

    def __iter__(self) -> Iterator[Loaded]:
        """Yield the parts of this worker's shards."""
        return _undisturbed(self._parts())

    def _parts(self) -> Iterator[Loaded]:
        turn, turns = _own_turn()
        replicas, replica = self._replicas
        shards = list(range(self._num_shards))[replica::replicas][turn::turns]
        samples: list[Any] = []
        read_so_far: dict[int, int] = {}
        for shard, place, sample in self._rounds(shards):
            samples.append(sample)
            if place is not None:
                read_so_far[shard] = place + 1
            if len(samples) == self._samples:
                yield self._part(samples, read_so_far, turn)
                samples, read_so_far = [], {}
        if self._at_end == "short" and len(samples) >= self._least:
            yield self._part(samples, read_so_far, turn)

    def _part(self, samples: list[Any], progress: dict[int, int], turn: int) -> Loaded:
        shard, place = next(iter(progress.items()), (0, 0))
        draw_from(self._seed, self._epoch, shard, place, len(samples))
        part = self._collate(samples)
        # A part of samples that were all given before.
        return replace(part, progress=progress, worker=turn, has_ended=not progress)

    def _rounds(self, shards: list[int]) -> Iterator[tuple[int, int | None, Any]]:
        """Yield samples of shards in turn: shard, place in it, sample.

        The shard of which the least was read is next: so it is after a checkpoint, too. Where data
        wrap, those read again have no place.
        """
        places = {shard: self._progress.get(shard, 0) for shard in shards}
        live = {shard: self._read(shard, skip=places[shard]) for shard in shards}
        while live:
            # The choice follows from the positions alone, so a loader that goes on takes the same
            # turns.
            shard = min(live, key=lambda each: (places[each], each))
            for sample in live[shard]:
                yield shard, places[shard], sample
                places[shard] += 1
                break
            else:
                del live[shard]
        if shards and not any(places.values()):
            raise ModelError(f"shards {shards} of the data have no sample; a loader needs some")
        while self._at_end == "wrap" and shards:
            for shard in shards:
                for sample in self._read(shard):
                    yield shard, None, sample

    def _read(self, shard: int, skip: int = 0) -> Iterator[Any]:
        data = self._data.shard(num_shards=self._num_shards, index=shard)
        return read(data, self._seed, self._epoch, shard, skip=skip)


def read(data: Any, seed: int, epoch: int, shard: int, *, skip: int = 0) -> Iterator[Any]:
    """Yield the samples of data from the front but the first `skip`, which are read, too.

    What the data draw is drawn from the sample's place. Raises ModelError for data without one.
    """
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)
    draw_from(seed, epoch, shard)
    samples = iter(data)
    for place in count():
        draw_from(seed, epoch, shard, place)
        try:
            sample = next(samples)
        except StopIteration:
            return
        if place >= skip:
            yield sample


def _undisturbed(parts: Iterator[Loaded]) -> Iterator[Loaded]:
    """Yield parts whose making draws random numbers; the script's generators stay as they are."""
    while True:
        with generators_kept():
            part = next(parts, None)
        if part is None:
            return
        yield part


def _own_turn() -> tuple[int, int]:
    """Return this worker's number, and how many there are; data read later see no worker.

    They would take a share of their own of what was dealt to workers here.
    """
    info = get_worker_info()
    if info is None:
        return 0, 1
    worker._worker_info = None
    return info.id, info.num_workers


def places_of(split: BatchSplit, parts: int, number: int, together: Unit = SAMPLE) -> list[int]:
    """Return which samples of a batch are in one of the parts that it is cut into, as units of
    those that belong together.
    """
    units = [unit for m in range(split.num_microbatches) for unit in split.part(m, parts, number)]
    return together.places(units, split.num_samples)
