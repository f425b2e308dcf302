"""Parameters with copies on several stages: who exchanges their gradients with whom.

Where the pp ranks that hold copies have meshes of one shape and place it alike, ranks at one
place hold the same piece, and one all-reduce sums it. Else every rank is sent the parts of its own
piece from the pieces of each other mesh, and adds them up in the order of the pp ranks, so that the
copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.boxes import Box, box_transfers, sizes, slices
from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements
from planner.language.lowering.holdings import sharing_of
from planner.language.lowering.wiring import param_placements, stage_params
from planner.language.plan import Plan
from planner.runtime.process.groups.exchange import exchange
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.stage import StageModule
from planner.runtime.state.gradients.reduce import TiedCopies
from planner.runtime.state.masters import MasterParams
from planner.runtime.state.optimizers.host_optimizer import HostMasters

Exchange = Callable[[list[Tensor]], list[Tensor]]


def tied_copies(
    graph: ModelGraph,
    plan: Plan,
    mesh: Mesh,
    owners: Mapping[int, StageModule | MasterParams | HostMasters],
    *,
    without: Collection[str] = (),
) -> list[TiedCopies]:
    """Return this rank's parameters with copies on several stages, by the pp ranks that hold them.

    `owners` name what is trained of each of this rank's stages; those `without` are summed
    elsewhere (`planner.runtime.state.tables`). Every rank calls this and goes
    through the groups in the same order. Raises LayoutError for a copy that can't be matched
    with those on a mesh of another shape, or of other placements.
    """
    by_holders: dict[tuple[tuple[int, ...], bool], list[TensorMeta]] = {}
    placed = cache(partial(param_placements, graph, plan))
    for meta in graph.params:
        users = [s for s, names in enumerate(stage_params(graph, plan)) if meta.name in names]
        if meta.requires_grad and len(users) > 1 and meta.fqn not in without:
            holders = tuple(sorted({plan.stages[s].pp_rank for s in users}))
            pieces = {(mesh.meshes[at].shape, placed(at)[meta.name]) for at in holders}
            by_holders.setdefault((holders, len(pieces) == 1), []).append(meta)
    result = []
    # Sorted: all ranks make the groups in the same order, those that hold no copy too.
    named = [owner.named_params() for owner in owners.values()]
    for (holders, is_alike), shared in sorted(by_holders.items()):
        # (Of experts' own parameters a rank, and those at its place on other meshes, have some.)
        metas = [meta for meta in shared if any(meta.fqn in params for params in named)]
        exchange = _exchange(graph, plan, mesh, holders, metas, is_alike=is_alike)
        if mesh.rank("pp") in holders:
            copies = [[p[meta.fqn] for p in named if meta.fqn in p] for meta in metas]
            result.append(TiedCopies(copies, exchange))
    return result


def _exchange(
    graph: ModelGraph,
    plan: Plan,
    mesh: Mesh,
    holders: tuple[int, ...],
    metas: Sequence[TensorMeta],
    *,
    is_alike: bool,
) -> Exchange:
    """Return what sums these parameters over pp ranks; `is_alike`: each has pieces of one kind."""
    meshes = [mesh.meshes[pp_rank] for pp_rank in holders]
    if len(holders) == 1:
        return lambda totals: totals
    if is_alike:
        # Ranks at one place hold the same piece.
        group = mesh.open_group(zip(*(m.ranks for m in meshes), strict=True))
        return partial(_all_reduce, group=group)
    placements = [param_placements(graph, plan, pp_rank) for pp_rank in holders]
    ways = []
    for meta in metas:
        boxes = [
            boxes_of(graph, plan, meta, at[meta.name], pp_rank)
            for at, pp_rank in zip(placements, holders, strict=True)
        ]
        ways.append(boxes)
    return partial(_add_across, ways=ways)


def _all_reduce(totals: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    # In place and each alone: a message of all would copy what may be the model's largest tensors.
    works = [dist.all_reduce(total, group=group, async_op=True) for total in totals]
    for work in works:
        if work is not None:
            work.wait()
    return totals


def boxes_of(
    graph: ModelGraph, plan: Plan, meta: TensorMeta, placements: Placements, pp_rank: int
) -> dict[int, Box]:
    """Return the part of a parameter's gradient that each rank of a pp rank holds."""
    for axis, placement in placements.pairs:
        if isinstance(placement, Shard) and placement.segments > 1:
            users = [block.name for block in graph.blocks if meta.name in block.params]
            raise LayoutError(
                f"blocks {users[0]} and {users[-1]} share {meta.fqn}, which lies as {placement} on "
                f"{axis}, and their stages have different {axis} or place it otherwise; give both "
                f"stages the same {axis}, or pin it to R"
            )
    mesh = plan.mesh(pp_rank)
    shared = sharing_of(meta, placements, plan, pp_rank)
    shape, name = meta.shape_at(1), meta.fqn
    return {
        rank: piece_of(shape, placements, mesh, rank, shared.chunked, name=name).span
        for rank in mesh.ranks
    }


def _add_across(totals: list[Tensor], ways: list[list[dict[int, Box]]]) -> list[Tensor]:
    """Return the sums over all meshes of each parameter's gradient, for this rank's box.

    `ways` gives, for each parameter and mesh, which box of it each rank holds.
    """
    here = dist.get_rank()
    jobs = []
    sums: list[tuple[Box, list[tuple[Box, Tensor]]]] = []
    for total, meshes in zip(totals, ways, strict=True):
        mine = next(boxes for boxes in meshes if here in boxes)
        terms = []
        for other in meshes:
            if other is mine:
                terms.append((mine[here], total))
                continue
            # Both ends work out all transfers, and take those that are theirs.
            for way in box_transfers(mine, other):
                if way.src_rank == here:
                    part = total[slices(way.box, mine[here])].contiguous()
                    jobs.append(dist.P2POp(dist.isend, part, way.dst_rank))
            for way in box_transfers(other, mine):
                if way.dst_rank == here:
                    part = total.new_empty(sizes(way.box))
                    jobs.append(dist.P2POp(dist.irecv, part, way.src_rank))
                    terms.append((way.box, part))
        sums.append((mine[here], terms))
    exchange(jobs)
    result = []
    for total, (held, terms) in zip(totals, sums, strict=True):
        # In the order of the pp ranks, on every rank: another order rounds otherwise, and copies
        # that differ in the last bit drift apart.
        summed = torch.zeros_like(total)
        for box, term in terms:
            summed[slices(box, held)] += term
        result.append(summed)
    return result
