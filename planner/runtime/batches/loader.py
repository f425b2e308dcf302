"""A dataset dealt to ranks: for each step the own part of this rank's replica."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from planner.errors import ModelError, PlanError, PlannerError
from planner.language.graph.unit import SAMPLE, Unit
from planner.language.plan import Plan
from planner.runtime.batches.draws import generators_kept, seed_of
from planner.runtime.batches.inputs.agreement import Agreed, Said, agree
from planner.runtime.batches.inputs.feeder import Feeder
from planner.runtime.batches.order import AtEnd, Order
from planner.runtime.batches.sampler import OwnPart
from planner.runtime.batches.samples import Collate, Loaded, MapParts, PartKey, as_it_is
from planner.runtime.batches.streams import ShardedStream, WholeStream, places_of
from planner.runtime.process.groups.mesh import Mesh

_ENDS = ("wrap", "drop", "short")


class Loader:
    """Gives the own parts of a dataset, pass by pass. Mutable: its position.

    `epoch` is the pass under way, or the next, and `samples` how many of the data's were given in
    it. Where samples belong together (`Plan.unit`), one of the data may be one sample of the batch,
    or make several: all that belong together, or some neighbours of them. Iterating
    goes on from there to the end of the pass, under any plan, with no sample lost or given twice.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        feeder: Feeder,
        data: Any,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        at_end: AtEnd | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        """See `Engine.loader`; `feeder` takes the parts."""
        self._mesh, self._plan, self._feeder = mesh, plan, feeder
        given = data if isinstance(data, DataLoader) else None
        if given is not None:
            data = given.dataset
        # A loop that was written for a DataLoader has a smaller batch at the end of a pass.
        tells_rest = at_end is None and given is not None
        if at_end is None:
            at_end = "drop" if given is not None and given.drop_last else "wrap"
        if at_end not in _ENDS:
            raise ModelError(
                f"at_end={at_end!r} is no end of a pass; use {', '.join(map(repr, _ENDS))}"
            )
        self._data, self._at_end, self._seed = data, at_end, seed
        self._options = _options(given, num_workers, prefetch_factor, pin_memory, mesh.device)
        self._collate = Collate(
            make=collate_fn or _collate_of(given), reads=feeder.reads, pad=feeder.pad
        )
        self._split = plan.split
        self._together = self._units_of(given)
        cuts = {plan.stage_degrees(s).along("batch") for s in range(len(plan.stages))}
        self._least = plan.least_units * self._together.size
        self._replicas = mesh.size("batch"), mesh.rank("batch")
        self._order: Order | None = None
        self._num_shards = 0
        if not _is_stream(data):
            self._order = self._map_order(given, bool(shuffle))
        else:
            _check_stream(data, shuffle)
            shards = _num_shards(data)
            # (Samples that belong together may lie in several shards.)
            is_whole = self._together.is_sample
            if is_whole and len(cuts) == 1 and shards and shards % max(cuts) == 0:
                self._num_shards = shards
        self.epoch = self.samples = 0
        self._progress: dict[int, int] = {}
        if tells_rest:
            self.warn_of_rest("at_end='short' does, too (prepare takes it as loader_options)")

    def _map_order(self, given: DataLoader[Any] | None, shuffle: bool) -> Order:
        sampler, gives_batches = None, False
        if given is not None:
            batches = given.batch_sampler
            if batches is not None and type(batches) is not BatchSampler:
                sampler, gives_batches = batches, True
            elif _draws_a_permutation(given.sampler):
                shuffle = True
            elif not isinstance(given.sampler, SequentialSampler):
                sampler = given.sampler
            _refuse_dealt(sampler, getattr(sampler, "sampler", None))
            if not gives_batches and given.batch_size not in (None, self._batch):
                raise ModelError(
                    f"the DataLoader has batch_size={given.batch_size} and the plan's global batch "
                    f"is {self._batch}; give it that batch_size, or search with "
                    f"`global_batch`={given.batch_size}"
                )
        return Order(
            num_samples=len(self._data),
            batch=self._batch,
            least=self._least,
            at_end=self._at_end,
            shuffle=shuffle,
            seed=self._seed,
            sampler=sampler,
            batches_of_sampler=gives_batches,
            together=self._together.size,
        )

    @property
    def _batch(self) -> int:
        """Samples of the data that make a whole batch."""
        return self._split.num_samples * self._together.size

    def _units_of(self, given: DataLoader[Any] | None) -> Unit:
        """How samples of the data belong together: as those of the batch do, where each is one; a
        pair of the data belongs to no other.

        A DataLoader says it by its batch size. Else a collate_fn is tried on a few samples.
        """
        unit = self._plan.unit
        if unit.size == 1:
            return SAMPLE
        each = 1
        if given is not None and type(given.batch_sampler) is BatchSampler and given.batch_size:
            fits = self._plan.global_batch % given.batch_size == 0
            each = self._plan.global_batch // given.batch_size if fits else 1
        elif self._collate.make is not None:
            each = self._samples_of_one()
        if each == unit.size:
            return SAMPLE
        if each == 1 or (unit.runs == 1 and unit.size % each == 0):
            return replace(unit, size=unit.size // each)
        if given is not None and given.batch_size:
            return unit  # (of another batch size: told beside)
        raise ModelError(
            f"the collate_fn makes {each} samples of each of the data, and samples belong together "
            f"in {unit.spelled}; make 1 or {unit.size} of each"
        )

    def _samples_of_one(self) -> int:
        """How many samples of the batch a collate_fn makes of each sample of the data."""
        unit = self._plan.unit
        assert self._collate.make is not None
        with generators_kept():
            if _is_stream(self._data):
                _check_stream(self._data, shuffle=False)
                few = list(islice(iter(self._data), unit.size))
            else:
                few = [self._data[n] for n in range(min(unit.size, len(self._data)))]
            made = self._collate.make(few) if few else None
        rows = self._feeder.samples_of(made) if few else len(few)
        return rows // len(few) if few and rows % len(few) == 0 else 1

    def warn_of_rest(self, instead: str) -> None:
        """Warn where batches at the end of a pass are filled up, so that some samples count twice.

        `instead` says how they are not. On rank 0.
        """
        order = self._order
        if self._mesh.global_rank or order is None or order.at_end != "wrap":
            return
        count = order.samples_of_pass
        rest = 0 if count is None else count % order.batch
        if rest:
            warnings.warn(
                LoaderWarning(
                    f"a pass of {count} samples ends with {rest} that make no batch of "
                    f"{order.batch}; they are filled up from the front, so {order.batch - rest} "
                    "samples are trained on twice in it, where a DataLoader gives a smaller batch; "
                    f"{instead}"
                ),
                stacklevel=3,
            )

    def __len__(self) -> int:
        """Batches of a pass. Raises TypeError for a stream, whose length nobody has."""
        if self._order is None:
            raise TypeError("a stream has no length")
        return len(self._order)

    def __iter__(self) -> Iterator[OwnPart]:
        """Yield the parts of the pass under way that were not given yet; all ranks iterate.

        Raises PlanError on all ranks where the data of one fail, ModelError where ranks of one
        replica read other samples.
        """
        parts = self._parts() if self._feeder.reads else None
        # Of what wraps: whether each worker's data have come round.
        shards = len(range(self._num_shards)[self._replicas[1] :: self._replicas[0]])
        workers = max(1, self._options["num_workers"])
        ended = dict.fromkeys(range(min(shards, workers)), False)
        while True:
            loaded: Loaded | None = None

            def say() -> Said:
                nonlocal loaded
                if parts is None:
                    return self._feeder.say(None)
                loaded = _next_of(parts)
                if loaded is None:
                    return Said(parts=self._replicas[0], number=self._replicas[1], has_ended=True)
                ended[loaded.worker] = loaded.has_ended
                return self._feeder.say(
                    loaded.batch,
                    whole=loaded.whole,
                    order=loaded.order,
                    marks=loaded.marks,
                    has_ended=all(ended.values()),
                    progress=loaded.progress,
                )

            agreed = agree(self._mesh, self._plan, say)
            if agreed is None:
                break
            self._advance(agreed)
            yield OwnPart(None if loaded is None else loaded.batch, agreed)
        self.epoch, self.samples, self._progress = self.epoch + 1, 0, {}

    def _advance(self, agreed: Agreed) -> None:
        self.samples += agreed.split.num_samples * self._together.size
        self._progress |= agreed.progress

    def _parts(self) -> Iterator[Loaded]:
        """The parts that this rank loads from here on."""
        # (Of its own: the script's generators stay as they are, and workers of peers are alike.)
        generator = torch.Generator().manual_seed(seed_of(self._seed, self.epoch, self.samples))
        options = self._options | {
            "batch_size": None,
            "collate_fn": as_it_is,
            "generator": generator,
        }
        if self._order is not None:
            dataset = MapParts(self._data, self._seed, self._collate)
            return iter(DataLoader(dataset, sampler=_Keys(self._keys), **options))
        if not self._num_shards:
            stream: IterableDataset[Loaded] = WholeStream(
                self._data,
                collate=self._collate,
                split=self._split,
                least=self._least,
                replicas=self._replicas,
                at_end=self._at_end,
                seed=self._seed,
                epoch=self.epoch,
                start=self.samples,
                together=self._together,
            )
        else:
            stream = ShardedStream(
                self._data,
                collate=self._collate,
                num_shards=self._num_shards,
                samples=sum(map(len, self._split.own(*self._replicas))),
                least=self._plan.num_microbatches,
                replicas=self._replicas,
                at_end=self._at_end,
                seed=self._seed,
                epoch=self.epoch,
                progress=self._progress,
            )
        return iter(DataLoader(stream, **options))

    def _keys(self) -> Iterator[PartKey]:
        assert self._order is not None
        for first, samples in self._order.batches(self.epoch, self.samples):
            # (The last batch may be smaller: it is cut by the same shares.)
            split = self._split.resized(len(samples) // self._together.size)
            own = places_of(split, *self._replicas, self._together)
            yield PartKey(
                epoch=self.epoch,
                whole=split.num_samples,
                order=zlib.crc32(repr(samples).encode()),
                places=[first + place for place in own],
                numbers=[samples[place] for place in own],
            )

    # -- its position -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last part that was given; equal on all ranks."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "shards": dict(self._progress),
            "of": self._of(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position, under whatever plan. Raises PlanError for one in other data."""
        if state["of"] != self._of():
            raise PlanError(
                f"the position is one in {_told(state['of'])}, and this loader reads "
                f"{_told(self._of())}; give the data and settings of then (a stream of shards is "
                "read by shard where their number is a multiple of dp)"
            )
        self.epoch, self.samples = state["epoch"], state["samples"]
        self._progress = dict(state["shards"])

    def _of(self) -> dict[str, Any]:
        """What a position is one in."""
        if self._order is None:
            return {"shards": self._num_shards, "seed": self._seed}
        order = self._order
        own = {"samples": order.num_samples, "seed": self._seed, "shuffle": order.shuffle}
        return own if order.sampler is None else own | {"sampler": type(order.sampler).__name__}


class _Keys:
    """What a DataLoader takes for a sampler: the keys of the parts still to be made."""

    def __init__(self, keys: Callable[[], Iterator[PartKey]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[PartKey]:
        return self._keys()


def _next_of(parts: Iterator[Loaded]) -> Loaded | None:
    """Return the next part; None at the end. Raises ModelError for what the user's data raise."""
    try:
        return next(parts, None)
    except PlannerError:
        raise
    except Exception as error:
        text = str(error).strip()
        last = text.splitlines()[-1] if text else ""
        raise ModelError(f"its data failed: {type(error).__name__}: {last}") from error


def _is_stream(data: Any) -> bool:
    if isinstance(data, IterableDataset):
        return True
    return not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


class LoaderWarning(UserWarning):
    """A loader gives other batches than the DataLoader that it was made of."""


def _draws_a_permutation(sampler: Any) -> bool:
    """Whether a sampler gives each sample once, as `shuffle` does."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _refuse_dealt(*samplers: Any) -> None:
    """Refuse samplers that give each rank other samples, of which a replica would take a part."""
    for sampler in samplers:
        if getattr(sampler, "num_replicas", 1) != 1:
            raise ModelError(
                f"the DataLoader has a {type(sampler).__name__} of {sampler.num_replicas} replicas "
                "and the loader deals samples itself; leave the sampler out (shuffle=True)"
            )


def _check_stream(data: Any, shuffle: bool | None) -> None:
    if not hasattr(data, "__iter__"):
        raise ModelError(
            f"the data are a {type(data).__name__}, with neither __getitem__ and __len__ nor "
            "__iter__; give a dataset or an iterable of samples"
        )
    if iter(data) is data:
        raise ModelError(
            f"the data are a {type(data).__name__}, which can be read once; give something that "
            "iter() begins anew each time, as a checkpoint goes back to where it was"
        )
    if shuffle:
        raise ModelError(
            "shuffle=True needs a dataset with __getitem__ and __len__; shuffle a stream itself, "
            "by its set_epoch where it has one"
        )


def _num_shards(data: Any) -> int:
    """How many shards a stream says it can be asked for; 0 for none."""
    count = getattr(data, "num_shards", None) or getattr(data, "n_shards", None)
    return count if isinstance(count, int) and callable(getattr(data, "shard", None)) else 0


def _collate_of(given: DataLoader[Any] | None) -> Callable[[list[Any]], Any] | None:
    # (Without batches a DataLoader's own one does not put samples together. With a batch sampler
    # there are batches, and no batch size.)
    return None if given is None or given.batch_sampler is None else given.collate_fn


def _options(
    given: DataLoader[Any] | None,
    num_workers: int | None,
    prefetch_factor: int | None,
    pin_memory: bool | None,
    device: torch.device,
) -> dict[str, Any]:
    """What the DataLoader of parts takes from the script, or from the DataLoader given."""
    options: dict[str, Any] = {"num_workers": num_workers or 0}
    if given is not None:
        if num_workers is None:
            options["num_workers"] = given.num_workers
        options["timeout"] = given.timeout
        options["worker_init_fn"] = given.worker_init_fn
        options["multiprocessing_context"] = given.multiprocessing_context
        prefetch_factor = prefetch_factor or given.prefetch_factor
    if not options["num_workers"]:
        options.pop("multiprocessing_context", None)
        options.pop("timeout", None)
    elif prefetch_factor is not None:
        options["prefetch_factor"] = prefetch_factor
    options["pin_memory"] = device.type == "cuda" if pin_memory is None else pin_memory
    return options


def _told(of: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in of.items())
