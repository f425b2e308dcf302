"""What ranks tell each other of their own parts of a batch, before a step begins.

A replica's loader gives some samples, and no rank sees those of another. Three things follow from
all of them together: how the batch is cut (who sends how much to whom), what each loss counts for,
and whether something is wrong, which every rank must see, or the others would wait for ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import ModelError, PlannerError
from planner.language.graph.batch_split import BatchSplit
from planner.language.plan import Plan
from planner.runtime.batches.inputs.feed import whole_split
from planner.runtime.batches.inputs.whole_batch import OfPart
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.process.groups.together import together

_ORDER = "the tables by which samples are dealt"

_CHECKED_ELEMENTS = 512
"""Of a tensor: enough to tell samples apart, in some microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a rank says of its own part; its samples are units of those that belong together.

    Attributes:
        parts: into how many its stages cut the batch.
        number: which of these is its own.
        samples: how many it has; None where it read none.
        fits: which of the plan's shapes it may be filled up to, the smallest first; None where it
            read none.
        whole: samples of the whole batch, where samples are dealt as those of a batch that lies
            together; None where each replica has its own.
        order: a checksum of which samples of a dataset are in the whole batch; None where it reads
            none, or no dataset.
        has_ended: whether its data have come to an end; None where it read none.
        counted: what the user's loss weight counts in it; None where others say it.
        part: what others need of its samples; None where others say it, or nothing is needed.
        work: how much each of its samples is, where parts are dealt by it; None where others say
            it, or it is not known.
        marks: a checksum of some elements of each tensor, by path.
        progress: samples read so far of the shards it is made of.
    """

    parts: int
    number: int
    samples: int | None = None
    fits: tuple[int, ...] | None = None
    whole: int | None = None
    order: int | None = None
    has_ended: bool | None = None
    counted: float | None = None
    part: OfPart | None = None
    work: tuple[int, ...] | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    progress: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know of a batch: its cut, which of the plan's shapes it has, what the loss
    weight counts in all of it, what was told of its replicas' parts, in their order, how far
    shards of the data were read for it, and how much work the samples of each part are (() where
    that is not known).
    """

    split: BatchSplit
    bucket: int
    counted: float | None
    parts: tuple[OfPart, ...]
    progress: Mapping[int, int]
    work: tuple[tuple[int, ...], ...] = ()


def agree(mesh: Mesh, plan: Plan, say: Callable[[], Said]) -> Agreed | None:
    """Return what follows from what all ranks say; every rank calls it. None: data have ended.

    They have where a replica has none, or where the data of all have come to an end. Raises, on
    every rank, PlanError where `say` failed on one, ModelError where parts do not belong together.
    """

    def own() -> Said:
        try:
            return say()
        except (PlannerError, OSError) as error:
            raise ModelError(f"rank {mesh.global_rank}: {error}") from error

    said = together(mesh.control, own)
    # A replica without samples ends the pass for all; data that wrap end when those of all have
    # come round.
    ended = [each.has_ended for each in said if each.has_ended is not None]
    if ended and (all(ended) or any(each.has_ended and each.samples is None for each in said)):
        return None
    unit = plan.unit.size
    _check_peers(said, unit)
    wholes = {each.whole for each in said if each.whole is not None}
    if len(wholes) > 1:
        raise ModelError(
            f"ranks read global batches of {' and '.join(str(n * unit) for n in sorted(wholes))} "
            "samples; every rank must read the same data"
        )
    if len({each.order for each in said if each.order is not None}) > 1:
        raise ModelError(
            "ranks have other samples in one global batch, so replicas would train on some twice "
            "and on others never; let the dataset and its sampler give one order on every rank, "
            "from a seed that all have"
        )
    split = whole_split(wholes.pop(), plan) if wholes else _split_of_parts(said, plan)
    counts = [each.counted for each in said if each.counted is not None]
    if counts and not sum(counts) > 0:
        raise ModelError(
            "loss_weight counts nothing in any part of the batch, so it has no mean loss; give "
            "batches in which something counts"
        )
    told = {each.number: each.part for each in said if each.part is not None}
    progress = {shard: place for each in said for shard, place in each.progress.items()}
    return Agreed(
        split=split,
        bucket=_common_shape(said),
        counted=sum(counts) if counts else None,
        parts=tuple(told[number] for number in sorted(told)),
        progress=progress,
        work=_work_of_all(said),
    )


def _work_of_all(said: Sequence[Said]) -> tuple[tuple[int, ...], ...]:
    """Return how much work samples are, replica by replica; () where one's is not known."""
    by_number = {each.number: each.work for each in said if each.work is not None}
    # Stages that cut a batch in other numbers of parts have other samples by one number.
    counts = {each.parts for each in said}
    if len(counts) > 1 or set(by_number) != set(range(max(counts))):
        return ()
    return tuple(by_number[number] for number in sorted(by_number))


def _common_shape(said: Sequence[Said]) -> int:
    """Return the smallest shape that the parts of all ranks may be filled up to."""
    known = [each.fits for each in said if each.fits is not None]
    if not known:
        return 0
    common = [shape for shape in known[0] if all(shape in fits for fits in known)]
    if not common:
        raise ModelError(
            'ranks have batches of different shapes; planner.apply(..., pad={"PATH": VALUE}) fills '
            "them up to one, with a value for each tensor that is shorter"
        )
    # The smallest that fits all parts: each rank lists its own from the smallest on.
    return common[0]


def _check_peers(said: Sequence[Said], unit: int) -> None:
    """Raise ModelError where ranks of one replica have other samples."""
    firsts: dict[tuple[int, int], tuple[int, Said]] = {}
    marks: dict[tuple[int, int, str], tuple[int, int]] = {}
    for rank, own in enumerate(said):
        if own.samples is None:
            continue
        place = own.parts, own.number
        first, other = firsts.setdefault(place, (rank, own))
        wrong = ""
        if other.samples is not None and own.samples != other.samples:
            wrong = f"{other.samples * unit} and {own.samples * unit}"
        # By path: peers may read different tensors, of which only common ones can be compared.
        for path, mark in own.marks.items():
            before, known = marks.setdefault((*place, path), (rank, mark))
            if known != mark and not wrong:
                first, wrong = before, f"other values of {path}"
        if wrong:
            raise ModelError(
                f"ranks {first} and {rank} are of one replica and have other samples ({wrong}); "
                "all ranks of a replica read the same: shard data by engine.replica of "
                "engine.num_replicas, and seed what is random by it"
            )


def _split_of_parts(said: Sequence[Said], plan: Plan) -> BatchSplit:
    refuse_other_cuts(plan)
    by_replica = {each.number: each.samples for each in said if each.samples is not None}
    missing = sorted(set(range(plan.batch_parts)) - set(by_replica))
    if missing:
        raise ModelError(
            f"no rank of replica {missing[0]} gave a sample; give engine.step an OwnPart on every "
            "rank, with a batch where its stages read one"
        )
    samples = tuple(by_replica[number] for number in range(plan.batch_parts))
    unit = plan.unit.size
    for number, count in enumerate(samples):
        size = plan.shares[number] if plan.shares else plan.microbatch_size
        least, most = plan.num_microbatches, size // unit * plan.num_microbatches
        if not least <= count <= most:
            raise ModelError(
                f"replica {number} has {count * unit} samples; {plan.num_microbatches} "
                f"microbatches of at most {size} take {least * unit} to {most * unit}"
            )
    return BatchSplit.of_parts(samples, num_microbatches=plan.num_microbatches)


class Alike:
    """An exchange of the checksums of whole batches, under way beside a step.

    Each rank takes its part of the batch it is given, so ranks that are given others (a loader that
    shuffles by a seed of each process) would train on samples of one and labels of another.
    """

    def __init__(
        self, mesh: Mesh, leaves: Mapping[str, Tensor], order: Sequence[int] | None = None
    ) -> None:
        """Every rank begins it at the same time. Tensors on other devices are not looked at;
        `order` is that in which the rank takes the samples.
        """
        marks = marks_of(leaves)
        self._paths = sorted(leaves)
        self._num_ranks = dist.get_world_size()
        of_order = 0 if order is None else zlib.crc32(repr(order).encode())
        own = torch.tensor([*(marks.get(path, 0) for path in self._paths), of_order])
        # The largest of marks and of their negatives: equal where all ranks have one mark.
        self._found = torch.stack([own, -own])
        self._work = dist.all_reduce(
            self._found, op=dist.ReduceOp.MAX, group=mesh.control, async_op=True
        )

    def check(self) -> None:
        """Wait for the others. Raises ModelError, on every rank, where batches differ."""
        self._work.wait()
        largest, smallest = self._found[0], -self._found[1]
        different = [
            path
            for path, is_one in zip(
                (*self._paths, _ORDER), (largest == smallest).tolist(), strict=True
            )
            if not is_one
        ]
        if different:
            raise ModelError(
                f"the {self._num_ranks} ranks were given different batches (other values of "
                f"{different[0]}); give every rank the same whole batch (one seed for a loader "
                "that shuffles), let engine.loader deal the data, or give each replica's own part "
                "as planner.OwnPart"
            )


def refuse_other_cuts(plan: Plan) -> None:
    """Raise ModelError where stages cut the batch differently, so that no part is a replica's."""
    cuts = {plan.stage_degrees(index).along("batch") for index in range(len(plan.stages))}
    if len(cuts) > 1:
        raise ModelError(
            f"stages of the plan cut the batch in {' and '.join(map(str, sorted(cuts)))} parts, so "
            "a rank's own samples depend on the stage; let engine.loader deal a dataset, or give "
            "whole batches"
        )


def marks_of(leaves: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of some elements of each tensor that lies in host memory."""
    return {path: _mark(t) for path, t in leaves.items() if _is_on_host(t)}


def _is_on_host(tensor: Tensor) -> bool:
    is_real = not isinstance(tensor, FakeTensor)
    return is_real and tensor.device.type == "cpu" and tensor.numel() > 0


def _mark(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // _CHECKED_ELEMENTS)].contiguous()
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes())
