"""Values and gradients on their way from the block that makes them to the block that takes them.

Inside a stage a tensor is redistributed from how it is made to how it is taken. Between stages it
is brought to how it is sent, goes in parts from ranks to ranks, and is brought from how it arrived
to how it is taken. Both are done here with the runtime's redistributions and routes on simulated
ranks; the gradient goes back the same way.

    made --redistribute--> sent ==parts==> arrived --redistribute--> taken
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from planner.errors import PlannerError
from planner.language.graph import Affine, ModelGraph
from planner.language.layout.axes import batch_axes, members
from planner.language.layout.boxes import box_numel, sizes, slices
from planner.language.layout.placements import Placements, moves_between
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.routes import Routes
from planner.language.lowering.wiring import Edge, block_placements
from planner.language.plan import Plan
from planner.runtime.process.collectives import redistribute
from planner.runtime.proofs.by_block.simulate.lockstep import LockStep, OutOfStep
from planner.runtime.proofs.by_block.simulate.pieces_of import (
    largest_difference,
    of_gradient,
    sums_over,
    value_of,
)

_SUMMED = 1e-4
"""How far a sum of random terms in fp32 may be from the tensor they were made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A tensor from one block to another, as far as it decides what happens on the way.

    Attributes:
        shape: of a microbatch's tensor in each part of the batch.
        dtype: its elements'.
        requires_grad: whether a gradient goes back.
        made: how the block that makes it leaves it.
        taken: how the other block takes it.
        edge: the message between their stages; None inside a stage.
        stages: of the two blocks; of handovers inside stages, the first stage of each mesh.
    """

    shape: tuple[Any, ...]
    dtype: str
    requires_grad: bool
    made: Placements
    taken: Placements
    edge: Edge | None
    stages: tuple[int, int]


def handovers(graph: ModelGraph, plan: Plan, edges: Sequence[Edge]) -> dict[Handover, str]:
    """Return the handovers of a model that differ, each with the first tensor that goes so.

    `graph` gives the shapes, which may be those of shorter sequences.
    """
    homes = {block: s for s, stage in enumerate(plan.stages) for block in stage.blocks}
    by_place = {(edge.tensor, edge.consumer): edge for edge in edges}
    first_with: dict[Any, int] = {}
    for stage in range(len(plan.stages)):
        first_with.setdefault(plan.stage_degrees(stage), stage)
    found: dict[Handover, str] = {}
    seen: set[Any] = set()
    for block in graph.blocks:
        home = homes[block.index]
        taken, _, _ = block_placements(graph, plan, block.index, home)
        for name, place in zip(block.inputs, taken, strict=True):
            if name not in graph.producer:
                continue
            maker = graph.blocks[graph.producer[name]]
            source = homes[maker.index]
            _, _, made = block_placements(graph, plan, maker.index, source)
            meta = graph.tensor[name]
            edge = by_place.get((name, home)) if source != home else None
            if source != home and edge is None:
                continue  # `check_wires` tells
            degrees = plan.stage_degrees(source), plan.stage_degrees(home)
            left = made[maker.outputs.index(name)]
            way = None if edge is None else (edge.sent, edge.taken)
            key = (meta.shape, meta.dtype, meta.requires_grad, left, place, way, degrees)
            if key in seen:
                continue
            seen.add(key)
            stages = (source, home) if edge is not None else (first_with[degrees[0]],) * 2
            handover = Handover(
                shape=meta.shape,
                dtype=meta.dtype,
                requires_grad=meta.requires_grad,
                made=left,
                taken=place,
                edge=None if edge is None else replace(edge, shape=meta.shape),
                stages=stages,
            )
            found[handover] = name
    return found


def check_handover(
    handover: Handover, name: str, plan: Plan, routes_of: Callable[[Plan], Routes]
) -> list[str]:
    """Return what goes wrong with a handover's values or gradients, as sentences."""
    plan = _alone(plan)
    try:
        return list(_play(handover, name, plan, routes_of(plan)))
    except OutOfStep as error:
        return [f"{name}: collectives on its way do not match: {error}"]
    except (PlannerError, RuntimeError, ValueError, IndexError, KeyError) as error:
        return [f"{name} does not arrive: {str(error).splitlines()[0]}"]


def _alone(plan: Plan) -> Plan:
    """Return the plan with one replica of its samples, where all stages cut them alike."""
    if any(stage.own_sizes for stage in plan.stages):
        return plan
    single = plan.degrees.with_sizes(**{axis.name: 1 for axis in batch_axes()})
    return plan.model_copy(update={"degrees": single})


def _play(handover: Handover, name: str, plan: Plan, routes: Routes) -> Iterator[str]:
    source, target = (plan.mesh(plan.stages[stage].pp_rank) for stage in handover.stages)
    # Two samples in each part where the plan has them, so that mixing them up shows.
    per_part = max(1, min(2, plan.microbatch_units // plan.batch_parts))
    cut = (per_part,) * plan.batch_parts
    dtype = getattr(torch, handover.dtype)
    dtype = torch.float32 if dtype.is_floating_point else dtype
    whole, cotangent = (
        _random(handover.shape, sum(cut), dtype, f"{name} {what}") for what in ("value", "gradient")
    )
    has_grad = handover.requires_grad and dtype.is_floating_point
    sent, arrived = (
        (handover.taken, handover.taken)
        if handover.edge is None
        else (handover.edge.sent, handover.edge.taken)
    )
    ends = _Ends(handover, cut, whole, cotangent)
    with ExitStack() as stack:
        first = stack.enter_context(LockStep(source))
        is_one = handover.edge is None
        second = first if is_one else stack.enter_context(LockStep(target))

        def leave(rank: int) -> tuple[Tensor, Tensor]:
            x = ends.value(source, handover.made, rank).requires_grad_(has_grad)
            return x, _moved(x, handover.made, sent, first.groups(rank))

        left = first.run(leave)
        here = {rank: y.detach() for rank, (_, y) in left.items()}
        if handover.edge is not None:
            here = _carried(here, handover.edge, routes, cut, target, is_grad=False)

        def come(rank: int) -> tuple[Tensor, Tensor]:
            y = here[rank].detach().requires_grad_(has_grad)
            z = _moved(y, arrived, handover.taken, second.groups(rank))
            if has_grad:
                torch.autograd.backward(z, ends.gradient(target, handover.taken, rank))
            return y, z.detach()

        came = second.run(come)
        yield from _compared(
            f"{name}, from stage {handover.stages[0]} to stage {handover.stages[1]},",
            {rank: z for rank, (_, z) in came.items()},
            handover.taken,
            target,
            lambda rank: ends.value(target, of_gradient(handover.taken), rank),
        )
        if not has_grad:
            return
        back = {rank: _grad(y) for rank, (y, _) in came.items()}
        if handover.edge is not None:
            back = _carried(back, handover.edge, routes, cut, source, is_grad=True)

        def turn(rank: int) -> Tensor:
            x, y = left[rank]
            torch.autograd.backward(y, back[rank])
            return _grad(x)

        grads = first.run(turn)
        made_in, taken_in = handover.stages
        yield from _compared(
            f"the gradient of {name}, from stage {taken_in} to stage {made_in},",
            grads,
            of_gradient(handover.made),
            source,
            lambda rank: ends.gradient(source, handover.made, rank),
        )


@dataclass(frozen=True, slots=True)
class _Ends:
    """What ranks have of a tensor and of its gradient at either end."""

    handover: Handover
    cut: tuple[int, ...]
    whole: Tensor
    cotangent: Tensor

    def value(self, mesh: ProcessMesh, placed: Placements, rank: int) -> Tensor:
        return value_of(self._samples(self.whole, mesh, rank), placed, mesh, rank).clone()

    def gradient(self, mesh: ProcessMesh, placed: Placements, rank: int) -> Tensor:
        own = self._samples(self.cotangent, mesh, rank)
        return value_of(own, of_gradient(placed), mesh, rank)

    def _samples(self, tensor: Tensor, mesh: ProcessMesh, rank: int) -> Tensor:
        """Return the samples of a rank's replica."""
        batch = members("batch")
        parts, number = mesh.size(*batch), mesh.number(rank, *batch)
        each = sum(self.cut) // parts
        for dim, size in enumerate(self.handover.shape):
            if isinstance(size, Affine):
                own = size.per_sample * each + size.fixed
                return tensor.narrow(dim, size.per_sample * each * number, own)
        return tensor


def _random(shape: tuple[Any, ...], samples: int, dtype: torch.dtype, seed: str) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(seed.encode()))
    concrete = [size.at(samples) if isinstance(size, Affine) else size for size in shape]
    if dtype.is_floating_point:
        return torch.randn(concrete, generator=generator, dtype=dtype)
    return torch.randint(0, 2, concrete, generator=generator).to(dtype)


def _moved(tensor: Tensor, src: Placements, dst: Placements, groups: Mapping[str, Any]) -> Tensor:
    """Redistribute as a stage does between its blocks (`StageModule`)."""
    for axis, before, after in moves_between(src, dst):
        name = "" if groups[axis] is None else groups[axis].group_name
        tensor = redistribute(tensor, name, str(before), str(after), False)
    return tensor.view_as(tensor)


def _carried(
    tensors: Mapping[int, Tensor],
    edge: Edge,
    routes: Routes,
    cut: tuple[int, ...],
    target: ProcessMesh,
    *,
    is_grad: bool,
) -> dict[int, Tensor]:
    """Return what arrives on each rank of the target, part by part, as `Post` sends them."""
    parts = routes.parts(edge, cut, is_grad=is_grad)
    arrived: dict[int, Tensor] = {}
    some = next(iter(tensors.values()))
    for rank in target.ranks:
        needed = routes.box(edge, cut, rank)
        # NaN where nothing arrives, so that a missing part shows.
        buffer = some.new_full(sizes(needed), float("nan") if some.is_floating_point() else 0)
        for part in parts:
            if part.target != rank:
                continue
            held = routes.box(edge, cut, part.source)
            own = tensors[part.source]
            where = None if part.box == held else slices(part.box, held)
            given = own if where is None else own[where]
            # (The whole of it. Of a piece of segments only the box's sizes are true.)
            if box_numel(part.box) == box_numel(needed):
                buffer = given.reshape(sizes(needed)).clone()
            else:
                buffer[slices(part.box, needed)] = given
        arrived[rank] = buffer
    return arrived


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _compared(
    what: str,
    found: Mapping[int, Tensor],
    placed: Placements,
    mesh: ProcessMesh,
    expected: Callable[[int], Tensor],
) -> Iterator[str]:
    for ranks in sums_over(placed, mesh):
        # Terms of a sum are added up before they are compared.
        total = found[ranks[0]]
        for rank in ranks[1:]:
            total = total + found[rank]
        apart = largest_difference(total.detach(), expected(ranks[0]))
        if not apart <= _SUMMED:
            yield f"{what} arrives wrong on rank {ranks[0]}: {apart:.2e} off"
            return
