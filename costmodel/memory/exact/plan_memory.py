"""Memory of each pp rank of a plan, at the fullest sample of its row of the job table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodel.cache import CostCache
from costmodel.memory.exact.messages import find_traffic
from costmodel.memory.exact.rank_walk import MemorySample, walk_rank
from costmodel.memory.exact.resident import RankState, resident_parts
from costmodel.memory.exact.stage.placed_stage import PlacedStages
from costmodel.memory.parts import MemoryParts, with_overheads
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.tied import check_copies, tied_stages
from planner.plan import Plan
from planner.runtime.step.messages.wiring import Edge, build_edges
from planner.schedule.jobs import Schedule


def plan_memory(
    plan: Plan, costs: CostCache, schedule: Schedule, weights: Mapping[int, StageLoad]
) -> tuple[MemoryParts, ...]:
    """Return the memory of some pp ranks, from the job table's own order; `weights` are the
    parameters of each, of all its stages together.
    """
    edges = build_edges(costs.graph, plan)
    check_copies(plan, costs.graph)
    tied = tied_stages(plan, costs.graph)
    placed = PlacedStages(plan, costs, edges)
    ranks = (
        RankState(
            plan=plan,
            costs=costs.of_group(plan.device_groups[pp_rank]),
            pp_rank=pp_rank,
            stages={
                s: placed.jobs(s) for s, home in enumerate(plan.stage_to_pp_rank) if home == pp_rank
            },
            weights=load,
            tied=tied,
        )
        for pp_rank, load in weights.items()
    )
    return tuple(_rank_memory(rank, schedule, edges) for rank in ranks)


def _rank_memory(rank: RankState, schedule: Schedule, edges: Sequence[Edge]) -> MemoryParts:
    """Return the memory of a rank: what is resident, and the fullest sample of its walk."""
    worst, activations_on_host = _fullest(rank, schedule, edges)
    gradients = rank.summed_bytes if rank.ranks.has_buckets else worst.gradient_bytes
    # The optimizer's step comes when all activations are gone; it may be higher all the same.
    height = worst.peak_bytes - worst.gradient_bytes + gradients
    inside_job = worst.peak_bytes - worst.saved_bytes - worst.gradient_bytes - worst.buffer_bytes
    parts = resident_parts(rank)
    parts["host_bytes"] += activations_on_host
    parts["gradient_bytes"] += gradients
    parts["activation_bytes"] += worst.saved_bytes
    parts["transient_bytes"] += inside_job + max(0, rank.update_bytes - height)
    parts["communication_bytes"] += worst.buffer_bytes
    return with_overheads(MemoryParts(**parts), rank.costs.profile)


def _fullest(
    rank: RankState, schedule: Schedule, edges: Sequence[Edge]
) -> tuple[MemorySample, int]:
    """Return a rank's fullest sample, and the most bytes of activations on its host."""
    plan, stages = rank.plan, rank.stages
    row, home = schedule.jobs[rank.pp_rank], schedule.stage_to_pp_rank.__getitem__
    traffic = find_traffic(
        schedule.jobs,
        edges,
        home,
        rank.pp_rank,
        # gloo does not tell when a message has left, so its sender keeps it.
        keeps_sent=rank.costs.profile.cluster.device_type == "cpu",
        tp=lambda stage: plan.stage_degrees(stage)["tp"],
    )
    worst, on_host = None, 0
    for sample in walk_rank(row, stages, home, receive_ahead=plan.receive_ahead, traffic=traffic):
        on_host = max(on_host, sample.host_bytes)
        if worst is None or sample.peak_bytes > worst.peak_bytes:
            worst = sample
    assert worst is not None, "every rank has jobs"
    return worst, on_host
