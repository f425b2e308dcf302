"""Collectives of a whole step, rank by rank: all ranks of a group come to the same, in one order.

What a rank does in a block was recorded where the block was run (`blocks`). A step is its row of
the job table with each job's blocks in it, then the sums of gradients over replicas, then those
of tied copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees, lowered_axes, members
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.holdings import Holding
from planner.language.lowering.wiring import stage_params
from planner.language.plan import Plan
from planner.language.schedule import JobKind, Schedule
from planner.runtime.proofs.by_block.coverage import Held
from planner.runtime.proofs.by_block.simulate.lockstep import Call

BlockCalls = Mapping[tuple[int, Degrees], Mapping[int, tuple[tuple[Call, ...], tuple[Call, ...]]]]
"""By class and degrees: the collectives of each simulated rank, forward and backward."""


def check_collectives(
    graph: ModelGraph, plan: Plan, schedule: Schedule, calls: BlockCalls
) -> tuple[int, list[str]]:
    """Return how many collectives inside blocks all ranks run in a step, and what is wrong.

    Lines of ranks along each axis must run the same ones, in the same order, over the row.
    """
    total, faults = 0, []
    for pp_rank, row in enumerate(schedule.jobs):
        mesh = plan.mesh(pp_rank)
        by_place: dict[int, dict[str, tuple[int, int]]] = {}
        for rank in mesh.ranks:
            place = _simulated(mesh, rank)
            if place not in by_place:
                by_place[place] = _of_row(graph, plan, row, place, calls)
            total += sum(count for count, _ in by_place[place].values())
        for axis in (a.name for a in lowered_axes()):
            for line in mesh.groups(axis):
                ours = {r: by_place[_simulated(mesh, r)].get(axis, (0, 0)) for r in line}
                for rank, found in ours.items():
                    if found != ours[line[0]]:
                        faults.append(
                            f"on {axis}, rank {line[0]} runs {ours[line[0]][0]} collectives in a "
                            f"step and rank {rank} {found[0]}, or in another order"
                        )
    return total, faults


def _of_row(
    graph: ModelGraph, plan: Plan, row: Any, place: int, calls: BlockCalls
) -> dict[str, tuple[int, int]]:
    """Return the number and a digest of the collectives of a row along each axis."""
    of_job: dict[tuple[int, bool], dict[str, tuple[Call, ...]]] = {}
    found: dict[str, tuple[int, int]] = {}
    for job in row:
        if job.kind is JobKind.BACKWARD_WEIGHT:
            continue  # products alone
        key = (job.stage_index, job.kind is JobKind.FORWARD)
        if key not in of_job:
            of_job[key] = _of_job(graph, plan, *key, place, calls)
        for axis, own in of_job[key].items():
            count, digest = found.get(axis, (0, 0))
            # A running digest: equal only for the same collectives in the same order, in constant
            # memory.
            found[axis] = count + len(own), hash((digest, own))
    return found


def _of_job(
    graph: ModelGraph, plan: Plan, stage: int, is_forward: bool, place: int, calls: BlockCalls
) -> dict[str, tuple[Call, ...]]:
    blocks = plan.stages[stage].blocks
    degrees = plan.stage_degrees(stage)
    found: dict[str, tuple[Call, ...]] = {}
    for index in blocks if is_forward else reversed(blocks):
        made = calls.get((graph.blocks[index].class_index, degrees), {}).get(place)
        if made is None:
            continue
        for call in made[0 if is_forward else 1]:
            found[call.axis] = (*found.get(call.axis, ()), call)
    return found


def _simulated(mesh: ProcessMesh, rank: int) -> int:
    """Return the simulated rank that stands for a rank: its place on the inner axes."""
    return mesh.number(rank, *(axis.name for axis in reversed(lowered_axes())))


def check_sums(graph: ModelGraph, plan: Plan, held: Held) -> tuple[int, list[str]]:
    """Return how many sums of gradients a step takes over all groups, and what is wrong.

    Ranks that sum a gradient bring pieces of one shape: replicas with each other, and the holders
    of tied copies on pp ranks whose meshes are alike. (Others send each other the parts.)
    """
    total, faults = 0, []
    used = stage_params(graph, plan)
    found: dict[int, Mapping[str, Holding]] = {
        rank: held(rank) for pp_rank in range(plan.pp) for rank in plan.mesh(pp_rank).ranks
    }
    trained = {t.name: t for t in graph.params if t.requires_grad}
    # With ZeRO, ranks that sum shards are those with the same shard; FSDP2 scatters to the others.
    group = "shards" if plan.zero_stage == 0 else "copies"
    for pp_rank in range(plan.pp):
        mesh = plan.mesh(pp_rank)
        names = [n for s in _stages(plan, pp_rank) for n in used[s] if n in trained]
        for line in mesh.groups(*members("data" if group == "shards" else group)):
            if len(line) == 1:
                continue
            first = _shapes(found[line[0]], names)
            total += len(names)
            for rank in line[1:]:
                if _shapes(found[rank], names) != first:
                    name = next(
                        n for n, a, b in zip(names, first, _shapes(found[rank], names), strict=True)
                        if a != b
                    )  # fmt: skip
                    faults.append(
                        f"ranks {line[0]} and {rank} sum the gradient of {trained[name].fqn} and "
                        "hold other pieces of it"
                    )
    for name, meta in trained.items():
        holders = sorted({plan.stages[s].pp_rank for s, own in enumerate(used) if name in own})
        meshes = [plan.mesh(pp_rank) for pp_rank in holders]
        if len(holders) < 2 or len({mesh.shape for mesh in meshes}) > 1:
            continue
        for ranks in zip(*(mesh.ranks for mesh in meshes), strict=True):
            total += 1
            pieces = {found[rank][name].piece for rank in ranks if name in found[rank]}
            if len(pieces) != 1:
                faults.append(
                    f"ranks {list(ranks)} sum the gradient of {meta.fqn}, which blocks of their "
                    f"stages share, and hold {len(pieces)} different pieces of it"
                )
    return total, faults


def _stages(plan: Plan, pp_rank: int) -> list[int]:
    return [s for s, stage in enumerate(plan.stages) if stage.pp_rank == pp_rank]


def _shapes(held: Mapping[str, Holding], names: list[str]) -> list[Any]:
    return [held[name].piece if name in held else None for name in names]
