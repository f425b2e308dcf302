"""A global batch cut into this rank's microbatches, and the preamble run on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.errors import ModelError
from planner.language.graph import SAMPLE, Affine, ModelGraph, TensorMeta, Unit
from planner.language.graph.batch import Tree, flatten_batch, plain_values, unflatten_batch
from planner.language.graph.batch_split import BatchSplit
from planner.language.plan import Plan
from planner.runtime.batches.inputs.dealing import Dealt
from planner.runtime.stage.program_fx import to_graph_module

SideInputs = Callable[[int, int], tuple[Tensor, ...]]
"""From (stage, microbatch) to the stage's side inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One step's batch as this rank takes it.

    Attributes:
        split: how the whole batch is cut into microbatches and parts.
        num_samples: this rank's samples of each microbatch.
        side_inputs: gives a stage's side inputs of a microbatch.
        loss_weights: what the loss of each microbatch here counts for in the batch's (0-d;
            backwards start from them). Over all microbatches and parts they sum to 1, but where
            losses of parts add up each is 1 (0 without samples).
        totals: gives what the whole batch counts for each term of the loss: its samples, its
            labels, or what the user counts in it; empty where losses are sums over samples.
        bucket: which of the plan's shapes it has (0: its own).
        check: waits for what ranks exchange of the batch beside the step, and raises ModelError
            where they were given different ones.
        dealt: how samples were dealt by their work; None where it is not known, or does not count.
    """

    split: BatchSplit
    num_samples: tuple[int, ...]
    side_inputs: SideInputs
    loss_weights: Sequence[Tensor]
    totals: Callable[[], Mapping[str, float]]
    bucket: int = 0
    check: Callable[[], None] = lambda: None
    dealt: Dealt | None = None


@dataclass(frozen=True, kw_only=True)
class CutBatch:
    """A batch found to be one the plan can take, and where it is cut.

    Its `leaves` are of the whole batch, or of the samples of one replica; `bucket` says which of
    the plan's shapes `metas` are of (0: its own). Its samples, as those of the split, are units of
    those that belong together. `order` says by place in the split which of them is there; None: as
    they lie.
    """

    split: BatchSplit
    tree: Tree
    leaves: Mapping[str, Tensor]
    metas: Mapping[str, TensorMeta]
    bucket: int = 0
    unit: Unit = SAMPLE
    order: tuple[int, ...] | None = None

    def tensor(self, path: str, samples: range) -> Tensor:
        """Return some samples of a tensor; one without a batch dim is in every part."""
        if self.order is not None:
            places = self.order[samples.start : samples.stop]
            return rows_of(self.leaves[path], self.metas[path], places, self.unit)
        return piece_of(self.leaves[path], self.metas[path], samples, self.unit)

    def part(self, samples: range) -> Any:
        """Return some samples as a batch of the user's own structure."""
        return unflatten_batch(self.tree, {p: self.tensor(p, samples) for p in self.leaves})

    def reversed(self) -> CutBatch:
        """Return the same samples from the last to the first."""
        leaves = {
            path: _reversed(t, self.metas[path], self.unit) for path, t in self.leaves.items()
        }
        return replace(self, leaves=leaves)


def cut_batch(batch: Any, graph: ModelGraph, plan: Plan) -> CutBatch:
    """Return a whole batch with its cut into microbatches, whose sizes differ by at most one.

    Every rank is given the same, of up to ``plan.global_batch`` samples and at least one for
    each microbatch and replica. Raises ModelError for another number, and for a batch whose
    structure, plain values or shapes are not those of the captured one.
    """
    leaves, tree = flatten_batch(batch)
    metas = batch_metas(graph)
    check_structure(tree, leaves, graph, needed=metas)
    num_samples = count_samples(leaves, metas, unit=plan.unit)
    return CutBatch(
        split=whole_split(num_samples, plan),
        tree=tree,
        leaves=leaves,
        metas=metas,
        unit=plan.unit,
    )


def batch_metas(graph: ModelGraph) -> dict[str, TensorMeta]:
    """Return what is known of the batch's tensors, by path."""
    return {graph.tensor[name].fqn: graph.tensor[name] for name in graph.batch_inputs}


def whole_split(num_samples: int, plan: Plan) -> BatchSplit:
    """Return the split of a global batch of so many samples, or units of them.

    Raises ModelError for more than the plan's, or fewer than one for each microbatch and replica.
    """
    most_replicas = max(
        plan.stage_degrees(index).along("batch") for index in range(len(plan.stages))
    )
    if not plan.least_units <= num_samples <= plan.global_units:
        least, unit = plan.least_batch, plan.unit
        most = max(plan.shares, default=plan.microbatch_size)
        fitting = "" if least == plan.global_batch else f"{least} to "
        raise ModelError(
            f"the batch has {num_samples * unit.size} samples; {plan.num_microbatches} "
            f"microbatches on {most_replicas} replicas of at most {most} samples take "
            f"{fitting}{plan.global_batch}; give batches of that size"
        )
    return plan.split.resized(num_samples)


def check_structure(
    tree: Tree, leaves: Iterable[str], graph: ModelGraph, *, needed: Iterable[str]
) -> None:
    """Raise ModelError for a batch that lacks needed tensors, or has others than the captured one,
    or other plain values.
    """
    expected = {graph.tensor[name].fqn for name in graph.batch_inputs}
    lacking, strange = sorted(set(needed) - set(leaves)), sorted(set(leaves) - expected)
    if lacking or strange:
        what = f"lacks {', '.join(lacking)}" if lacking else f"has {', '.join(strange)} in addition"
        raise ModelError(
            f"the batch {what}; the plan was made with the tensors {', '.join(sorted(expected))}; "
            "give batches of that structure, or search again with this one"
        )
    given, planned = plain_values(tree), plain_values(graph.batch_tree)
    for path in sorted(given | planned):
        if given.get(path) != planned.get(path):
            raise ModelError(
                f"batch value {path} is {given.get(path)!r} and the plan was made with "
                f"{planned.get(path)!r}, which is part of the captured model; search again"
            )


def count_samples(
    leaves: Mapping[str, Tensor],
    metas: Mapping[str, TensorMeta],
    *,
    filled_up: Mapping[str, frozenset[int]] = MappingProxyType({}),
    unit: Unit = SAMPLE,
) -> int:
    """Return the number of samples, or units of them, that the shapes of all tensors agree on.

    Dims that are `filled_up` may be smaller. Raises ModelError where shapes are others, or dtypes
    that a cast to the captured one would not keep.
    """
    first, found = "", 0
    for path, tensor in leaves.items():
        meta, shape = metas[path], tuple(tensor.shape)
        for dim, size in enumerate(meta.shape):
            if isinstance(size, Affine) and not first and dim < len(shape):
                # (size = fixed + per_sample * samples, solved for samples.)
                first, found = path, (shape[dim] - size.fixed) // size.per_sample
                _refuse_part_of_unit(path, shape[dim] - size.fixed, size.per_sample, unit)
    for path, tensor in leaves.items():
        _check_dtype(path, tensor, metas[path])
        shape, meta = tuple(tensor.shape), metas[path]
        wanted, may_differ = meta.shape_at(found), filled_up.get(path, frozenset())
        if len(shape) != len(wanted) or any(
            have > want or (have < want and dim not in may_differ)
            for dim, (have, want) in enumerate(zip(shape, wanted, strict=True))
        ):
            raise ModelError(
                f"the batch tensor {path} has shape {shape}; for {found * unit.size} samples"
                f"{f', as {first} has,' if first not in ('', path) else ''} it must be "
                f"{wanted}{' or less, filled up' if may_differ else ''}"
            )
    return found


def _refuse_part_of_unit(path: str, rows: int, per_unit: int, unit: Unit) -> None:
    """Raise ModelError for a batch that ends inside samples that belong together."""
    if unit.is_sample or rows % per_unit == 0:
        return
    samples, rest = divmod(rows * unit.size, per_unit)
    if not rest and (why := unit.why_not(samples)):
        raise ModelError(f"the batch tensor {path} has {samples} samples, and {why}")
    raise ModelError(
        f"the batch tensor {path} has {rows} rows, and {per_unit} of them belong together; give a "
        f"multiple of {per_unit}"
    )


def _check_dtype(path: str, tensor: Tensor, meta: TensorMeta) -> None:
    """Raise ModelError for values that a cast to the captured dtype would change."""
    wanted = getattr(torch, meta.dtype)
    loses_fractions = tensor.is_floating_point() and not (
        wanted.is_floating_point or wanted.is_complex
    )
    if loses_fractions or (tensor.is_complex() and not wanted.is_complex):
        raise ModelError(
            f"the batch tensor {path} is {str(tensor.dtype).removeprefix('torch.')} and the plan "
            f"was made with {meta.dtype}, to which a cast would change its values; give "
            f"{meta.dtype}, or search again with this batch"
        )


def piece_of(tensor: Tensor, meta: TensorMeta, samples: range, unit: Unit) -> Tensor:
    """Return some samples of a tensor of the whole batch, or units of them.

    Raises ModelError for a tensor whose size does not follow from the samples alone.
    """
    for dim, size in enumerate(meta.shape):
        if isinstance(size, Affine):
            if size.fixed:
                raise ModelError(
                    f"dim {dim} of batch tensor {meta.fqn} is {size.per_sample} per sample plus "
                    f"{size.fixed}; it can't be cut into microbatches"
                )
            runs = unit.runs_of(size.per_sample)
            each = size.per_sample // runs
            start, length = each * samples.start, each * len(samples)
            if runs == 1:
                tensor = tensor.narrow(dim, start, length)
            elif length * runs != tensor.shape[dim]:
                # Of each run its own part: [runs, samples of a run].
                in_runs = tensor.unflatten(dim, (runs, -1)).narrow(dim + 1, start, length)
                tensor = in_runs.flatten(dim, dim + 1)
    return tensor


def rows_of(tensor: Tensor, meta: TensorMeta, samples: Sequence[int], unit: Unit) -> Tensor:
    """Return the same of samples that lie anywhere, in this order."""
    piece_of(tensor, meta, range(0), unit)  # (raises for what can't be cut)
    for dim, size in enumerate(meta.shape):
        if isinstance(size, Affine) and size.per_sample:
            runs = unit.runs_of(size.per_sample)
            rows = tensor.unflatten(dim, (runs, -1, size.per_sample // runs))
            places = torch.tensor(samples, dtype=torch.int64, device=tensor.device)
            taken = rows.index_select(dim + 1, places).flatten(dim, dim + 2)
            # What lay in pinned memory does so again, or the host would wait for its copy.
            tensor = taken.pin_memory() if tensor.is_pinned() else taken
    return tensor


def filled(tensor: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    """Return a tensor filled up to a shape, at the end of each dim."""
    if tuple(tensor.shape) == shape:
        return tensor
    # `F.pad` takes (before, behind) of each dim from the last to the first.
    behind = [(0, want - have) for have, want in zip(tensor.shape, shape, strict=True)]
    return F.pad(tensor, [n for pair in reversed(behind) for n in pair], value=value)


def _reversed(tensor: Tensor, meta: TensorMeta, unit: Unit) -> Tensor:
    for dim, size in enumerate(meta.shape):
        if isinstance(size, Affine) and size.per_sample:
            # The samples of a run change places; the entries of each sample stay in order.
            runs = unit.runs_of(size.per_sample)
            rows = tensor.unflatten(dim, (runs, -1, size.per_sample // runs))
            tensor = rows.flip(dim + 1).flatten(dim, dim + 2)
    return tensor


class Preamble:
    """The parameter-free values a stage needs, computed where they are used.

    Values that depend on no batch tensor are computed once for each number of samples and
    kept. Mutable for that reason. `inputs` are the batch tensors the stage needs, by name.
    """

    def __init__(
        self,
        graph: ModelGraph,
        wanted: Iterable[str],
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        wanted = tuple(wanted)
        self._preamble, self._tensors, self._device = graph.preamble, tensors, device
        self._made = tuple(name for name in wanted if name in graph.preamble.outputs)
        direct = (name for name in wanted if name not in self._made)
        self.inputs = tuple(dict.fromkeys((*direct, *graph.preamble.only(self._made).inputs)))
        self._parts: dict[int, tuple[dict[str, Tensor], _Part | None]] = {}

    def __call__(self, microbatch: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """Return the batch tensors of a microbatch and the values made from them."""
        if num_samples not in self._parts:
            self._parts[num_samples] = self._build(num_samples)
        fixed, moving = self._parts[num_samples]
        values = {**microbatch, **fixed}
        if moving is not None:
            values |= moving(microbatch)
        return values

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What it reads beside the batch, by names in the graph."""
        return self._tensors

    def take_values(self, values: Mapping[str, Tensor]) -> None:
        """Take other values for its tensors, by their names in the graph."""
        for name, tensor in self._tensors.items():
            if name in values:
                tensor.copy_(values[name])
        self._parts.clear()

    def _build(self, num_samples: int) -> tuple[dict[str, Tensor], _Part | None]:
        program = self._preamble.bind(num_samples)
        # What needs nothing of the batch (positions, causal masks) is made once and kept.
        fixed = tuple(n for n in self._made if not program.only((n,)).inputs)
        moving = tuple(n for n in self._made if n not in fixed)
        return (
            _Part(program.only(fixed), self._tensors, self._device)({}) if fixed else {},
            _Part(program.only(moving), self._tensors, self._device) if moving else None,
        )


class _Part:
    def __init__(self, program: Any, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._program = program
        self._run = to_graph_module(program, {}, device)
        self._params = [tensors[name] for name in program.params]

    @torch.no_grad()
    def __call__(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = [microbatch[name] for name in self._program.inputs]
        return dict(zip(self._program.outputs, self._run(*inputs, *self._params), strict=True))
