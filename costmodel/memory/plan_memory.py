"""Memory of each pp rank of a plan, at the worst moment of its row of the job table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from costmodel.cache import CostCache
from costmodel.memory.arrivals import find_traffic
from costmodel.memory.memory import (
    ADAMW_STATES,
    COUNTER_BYTES,
    MemoryParts,
    host_state_bytes,
    with_overheads,
)
from costmodel.memory.placed_stage import PlacedStages
from costmodel.memory.rank_walk import Moment, walk_rank
from costmodel.memory.steady_row import SteadyRow, steady_row
from costmodel.side_values import frozen_bytes
from costmodel.time.plan_price import PlanPrice
from costmodel.time.tied import check_copies, tied_stages, tied_sum_bytes
from planner.graph import ModelGraph
from planner.plan import Plan
from planner.plan.replication import Replication
from planner.runtime.step.wiring import Edge, build_edges
from planner.schedule.jobs import Schedule


def plan_memory(price: PlanPrice, costs: CostCache, schedule: Schedule) -> tuple[MemoryParts, ...]:
    """Return the memory of each pp rank, from the job table's own order."""
    plan = price.plan
    edges = build_edges(costs.graph, plan)
    check_copies(plan, costs.graph)
    tied = tied_stages(plan, costs.graph)
    placed = PlacedStages(plan, costs, edges)
    return tuple(
        _walked(price, costs, schedule, rank, edges, placed, tied) for rank in range(plan.pp)
    )


def _batch_bytes(plan: Plan, graph: ModelGraph) -> int:
    return sum(graph.tensor[n].bytes_at(plan.global_batch) for n in graph.batch_inputs)


def _worst(moments: Iterable[Moment], gap: int, more_bytes: int) -> tuple[Moment, Any]:
    """Return the highest of a rank's moments, from job `gap` on with more kept, and the most bytes
    on the host.
    """
    worst, on_host = None, 0
    for position, moment in enumerate(moments):
        on_host = max(on_host, moment.host_bytes)
        if more_bytes and position >= gap:
            moment = moment.holding(more_bytes)
        if worst is None or moment.peak_bytes > worst.peak_bytes:
            worst = moment
    assert worst is not None, "every rank has jobs"
    return worst, on_host


def _walked(
    price: PlanPrice,
    costs: CostCache,
    schedule: Schedule,
    rank: int,
    edges: Sequence[Edge],
    placed: PlacedStages,
    tied: Mapping[str, Sequence[int]],
) -> MemoryParts:
    """Return the memory of a rank from its byte walk."""
    plan, profile = price.plan, costs.profile
    mine = [s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank]
    replication = Replication.of(plan, mine[0])
    replicas, wide = replication.replicas, replication.gradient_factor
    weights = price.weights(rank)
    stages = {s: placed.jobs(s) for s in mine}
    row, home = SteadyRow(schedule.jobs[rank]), schedule.stage_to_pp_rank.__getitem__
    on_cpu = profile.cluster.device_type == "cpu"
    traffic = find_traffic(
        schedule.jobs,
        edges,
        home,
        rank,
        keeps_sent=on_cpu,
        tp=plan.stage_tp,
    )
    # What waits long enough is a count of its own, and other ranks' rows are whole.
    if not any(stage.on_host for stage in stages.values()) and not traffic.orders:
        row = steady_row(row.jobs, ahead=plan.receive_ahead)
    # Repetitions that were left out would have gathered losses.
    losses = row.left_out * sum(stage.loss_bytes for stage in stages.values())
    moments = walk_rank(row.jobs, stages, home, receive_ahead=plan.receive_ahead, traffic=traffic)
    worst, on_host = _worst(moments, row.gap, losses)
    shards = [stage.sharded.shard_bytes for stage in stages.values() if stage.sharded is not None]
    # What is stepped on: in bf16 masters, beside which ZeRO needs no weights at rest.
    stepped = sum(shards) if shards else wide * int(weights.param_bytes)
    resting = stepped // wide
    if shards and plan.precision == "bf16":
        resting = 0
    side_values = costs.side_values(plan.stage_microbatch_size(mine[0]))
    states = ADAMW_STATES * stepped + COUNTER_BYTES * int(weights.num_params)
    states += stepped if plan.precision == "bf16" else 0
    gradients, last_gradients = worst.gradient_bytes, stepped
    if not shards and replicas > 1:
        gradients = stepped
    if plan.optimizer_on_host:
        states = 0
        resting, last_gradients = (0, 0) if shards else (resting, stepped)
        on_host += host_state_bytes(
            weights, dp=replicas, sharded=bool(shards), precision=plan.precision
        )
    # Fused or foreach steps hold one more copy of what they update.
    steps_here = not on_cpu and not plan.optimizer_on_host
    tied_bytes = tied_sum_bytes(plan, costs.graph, tied, rank) * wide
    tied_bytes //= replicas if shards else 1
    after = max(stepped if steps_here else 0, tied_bytes) + last_gradients
    height = worst.peak_bytes - worst.gradient_bytes + gradients
    transient = worst.peak_bytes - worst.kept_bytes - worst.gradient_bytes - worst.buffer_bytes
    return with_overheads(
        MemoryParts(
            parameter_bytes=resting
            + frozen_bytes(plan, costs.graph, costs.links, rank, side_values),
            gradient_bytes=gradients,
            optimizer_bytes=states,
            activation_bytes=worst.kept_bytes,
            transient_bytes=transient + max(0, after - height),
            communication_bytes=worst.buffer_bytes,
            batch_bytes=_batch_bytes(plan, costs.graph),
            host_bytes=on_host,
        ),
        profile,
    )
