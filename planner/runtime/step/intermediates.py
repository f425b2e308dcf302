"""Values inside a model in training, whole: what an op made of a global batch, on one device.

A block is run as usual, by its own local program with the watched tensors as further
outputs, so what is seen is what training computes. Pieces are then put together over the axes
that blocks are lowered on (sums taken), and over replicas and microbatches along the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.language.across import runs_of_samples
from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import Affine, ModelGraph, TensorMeta
from planner.language.layout.axes import lowered_axes
from planner.language.layout.placement import Own, Partial, Placement, Shard
from planner.language.layout.placements import Placements
from planner.language.lowering.lowering import made_as
from planner.language.lowering.wiring import stage_of
from planner.language.schedule.jobs import Job, JobKind
from planner.runtime.process.collectives import run_step
from planner.runtime.stage.programs import Programs, Run
from planner.runtime.state.rank_state import RankState
from planner.runtime.step.returned import returned

if TYPE_CHECKING:
    from planner.runtime.stage.stage import BlockModule


@dataclass(frozen=True, slots=True)
class Watched:
    """A tensor of a block's program, by the name a user gives: ``BLOCK/TENSOR``."""

    name: str
    block: int
    tensor: str
    meta: TensorMeta


def intermediate_names(graph: ModelGraph) -> tuple[str, ...]:
    """Return the name of everything an op of a block makes, in order."""
    return tuple(
        f"{block.name}/{name}"
        for block in graph.blocks
        for op in graph.classes[block.class_index].ops
        for name in op.outputs
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What this rank's blocks made of `wanted`: by name and microbatch, pieces on its device."""

    wanted: tuple[Watched, ...]
    pieces: dict[tuple[str, int], Tensor]


@contextmanager
def watching(
    state: RankState, names: Iterable[str], programs: Programs, job: Callable[[], Job | None]
) -> Iterator[Seen]:
    """Inside, blocks with these tensors run by programs that hand those out too, detached.

    `programs` are those that blocks run by, and `job` gives the job that runs now. Raises PlanError
    for a name that `intermediate_names` does not list, and that is of no module that returns one
    tensor.
    """
    seen = Seen(tuple(_find(state.graph, name, state.modules) for name in dict.fromkeys(names)), {})
    by_block: dict[int, list[Watched]] = {}
    for watched in seen.wanted:
        by_block.setdefault(watched.block, []).append(watched)
    changed: list[tuple[BlockModule, Any]] = []
    try:
        for index, here in by_block.items():
            stage = stage_of(state.plan, index)
            if stage in state.stages:
                position = index - state.plan.stages[stage].first_block
                block: Any = state.stages[stage].blocks[position]
                changed.append((block, block.programs))
                handing_out = _handing_out(
                    state.graph.blocks[index].class_index, programs, job, here, seen.pieces
                )
                block.programs = handing_out, None
        yield seen
    finally:
        for block, own in changed:
            block.programs = own


def gathered(
    state: RankState,
    seen: Seen,
    known: dict[tuple[int, str], int],
    order: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Return what was seen of a global batch, whole, on rank 0's CPU, in the batch's own order.

    Other ranks get {}; all of them call it. A value without a dim that counts samples comes
    stacked, one for each microbatch and replica. `known` keeps what `runs_of_samples` found, by
    block and name: steps fetch the same again. `order` says by place in the split which sample of
    the batch was there (None: each its own).
    """
    mesh = state.mesh
    mine: list[tuple[str, int, int, Tensor]] = []
    for watched in seen.wanted:
        placed = _made_as(state, watched)
        for microbatch in range(state.plan.num_microbatches):
            value = seen.pieces.pop((watched.name, microbatch), None)
            if value is None:
                continue
            for axis, placement in reversed(placed.pairs):  # fine cuts first
                value = _whole(value, placement, mesh.group_name(axis))
            is_first = mesh.rank("batch") == 0 or not _is_of_all(state, watched)
            if mesh.is_first_of_samples and is_first:
                mine.append((watched.name, microbatch, mesh.rank("batch"), value.cpu()))
    runs = {} if mesh.global_rank else _runs(state.graph, seen.wanted, known)
    return _on_rank_0(mine, seen.wanted, mesh.control, runs, order)


def _find(graph: ModelGraph, name: str, modules: Mapping[str, type[nn.Module]]) -> Watched:
    """Return what a name means: a tensor of a block, or what a module returned, the last time."""
    block_name, _, tensor = name.rpartition("/")
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        if block.name == block_name and any(tensor in op.outputs for op in program.ops):
            return Watched(name, block.index, tensor, program.tensor[tensor])
    made = returned(graph, name, modules)
    program = graph.classes[graph.blocks[made.block].class_index]
    return Watched(name, made.block, made.tensor, program.tensor[made.tensor])


def _handing_out(
    class_index: int,
    programs: Programs,
    job: Callable[[], Job | None],
    watched: list[Watched],
    pieces: dict[tuple[str, int], Tensor],
) -> Callable[[int], Run]:
    """Return what gives, by number of samples, a program that notes the watched tensors."""
    program = programs.handing_out(class_index, tuple(each.tensor for each in watched))

    def noted(run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = run(*tensors)
        count = len(outputs) - len(watched)
        now = job()
        # A recomputation in the backward makes them once more.
        if now is not None and now.kind is JobKind.FORWARD:
            for each, value in zip(watched, outputs[count:], strict=True):
                pieces[each.name, now.microbatch_index] = value.detach()
        return outputs[:count]

    return lambda num_samples: partial(noted, program(num_samples))


def _made_as(state: RankState, watched: Watched) -> Placements:
    plan = state.plan
    degrees = plan.stage_degrees(stage_of(plan, watched.block))
    class_index = state.graph.blocks[watched.block].class_index
    program = _run(state).classes[class_index]
    layouts = {
        axis.name: plan.layout(class_index, axis=axis.name, degrees=degrees)
        for axis in lowered_axes()
    }
    return Placements.of(
        {axis: made_as(program, layout, watched.tensor) for axis, layout in layouts.items()}
    )


def _run(state: RankState) -> ModelGraph:
    return graph_under(state.graph, state.plan)


def _is_of_all(state: RankState, watched: Watched) -> bool:
    """Whether every replica has a value of the whole batch."""
    index = state.graph.blocks[watched.block].class_index
    made = _run(state).classes[index].tensor[watched.tensor]
    return made.shape != state.graph.classes[index].tensor[watched.tensor].shape


def _whole(value: Tensor, placement: Placement, group: str) -> Tensor:
    if not group:
        return value
    if isinstance(placement, Partial):
        return run_step(value, group, ("all_reduce", 0, 0))
    if isinstance(placement, Own) and placement.dim is not None:
        placement = Shard(placement.dim)  # what each rank has, one behind the other
    if isinstance(placement, Shard):
        is_bool = value.dtype == torch.bool  # which gloo does not know
        sent = value.to(torch.uint8) if is_bool else value
        gathered = run_step(sent, group, ("all_gather", placement, 0))
        return gathered.bool() if is_bool else gathered
    return value


def _on_rank_0(
    mine: list[tuple[str, int, int, Tensor]],
    wanted: Iterable[Watched],
    control: dist.ProcessGroup,
    runs: Mapping[str, int],
    order: Sequence[int] | None,
) -> dict[str, Tensor]:
    is_first = dist.get_rank() == 0
    everyone: list[Any] = [None] * dist.get_world_size() if is_first else []
    dist.gather_object(mine, everyone if is_first else None, dst=0, group=control)
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    for name, microbatch, number, value in (part for rank in everyone for part in rank):
        parts.setdefault(name, []).append((microbatch, number, value))
    if not is_first:
        return {}
    return {w.name: _joined(w.meta, parts[w.name], runs[w.name], order) for w in wanted}


def _runs(
    graph: ModelGraph, wanted: Iterable[Watched], known: dict[tuple[int, str], int]
) -> dict[str, int]:
    """In how many runs tensors have their samples."""
    places = {each.name: (each.block, each.tensor) for each in wanted}
    if new := [place for place in places.values() if place not in known]:
        known |= runs_of_samples(graph, new)
    return {name: known[place] for name, place in places.items()}


def _joined(
    meta: TensorMeta,
    parts: list[tuple[int, int, Tensor]],
    runs: int,
    order: Sequence[int] | None,
) -> Tensor:
    values = [value for _, _, value in sorted(parts, key=lambda part: part[:2])]
    counts_samples = [d for d, size in enumerate(meta.shape) if isinstance(size, Affine)]
    if not counts_samples:
        return torch.stack(values)
    dim = counts_samples[0]
    if runs == 1 and order is None:
        return torch.cat(values, dim)
    # Each part has its own samples of every run: [runs, samples of a run].
    whole = torch.cat([v.unflatten(dim, (runs, -1)) for v in values], dim + 1)
    if order is not None:
        # Place p has sample order[p]: each goes back to where it was given.
        by_sample = whole.unflatten(dim + 1, (len(order), -1))
        back = torch.tensor(order).argsort()
        whole = by_sample.index_select(dim + 1, back).flatten(dim + 1, dim + 2)
    return whole.flatten(dim, dim + 1)
