"""Memory of each pp rank of a plan, at the worst moment of its row of the job table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodel.boundary import Arrivals
from costmodel.cache import CostCache
from costmodel.communication import MASTER_FACTOR
from costmodel.memory import (
    ADAMW_STATES,
    COUNTER_BYTES,
    MemoryParts,
    StageBytes,
    activation_peak,
    host_state_bytes,
    job_peak_bytes,
    kept_bytes,
    rank_memory,
    with_overheads,
)
from costmodel.placed_stage import stage_jobs
from costmodel.plan_price import PlanPrice
from costmodel.rank_walk import walk_rank
from costmodel.stage import StageLoad, join
from planner.graph import ModelGraph
from planner.placement import Shard
from planner.plan import Plan, StagePlan
from planner.runtime.wiring import Edge, build_edges, param_placements, stage_params
from planner.schedule.jobs import Schedule
from planner.schedule.trips import trips


def plan_memory(price: PlanPrice, costs: CostCache, schedule: Schedule) -> tuple[MemoryParts, ...]:
    """Return the memory of each pp rank, from the job table's own order."""
    plan = price.plan
    edges = build_edges(costs.graph, plan)
    tied = _tied_params(plan, costs.graph)
    return tuple(
        _sharded(price, costs, schedule, rank)
        if _is_sharded(plan, rank)
        else _walked(price, costs, schedule, rank, edges, tied)
        for rank in range(plan.pp)
    )


def _is_sharded(plan: Plan, rank: int) -> bool:
    stage = next(s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank)
    return plan.zero_stage > 0 and plan.stage_dp(stage) * plan.cp > 1


def _batch_bytes(plan: Plan, graph: ModelGraph) -> int:
    return sum(graph.tensor[n].bytes_at(plan.global_batch) for n in graph.batch_inputs)


def _tied_params(plan: Plan, graph: ModelGraph) -> dict[str, list[int]]:
    """Return the stages that use each trained parameter of several stages."""
    users: dict[str, list[int]] = {}
    for stage, names in enumerate(stage_params(graph, plan)):
        for name in names:
            users.setdefault(name, []).append(stage)
    return {
        name: stages
        for name, stages in users.items()
        if len(stages) > 1
        and graph.tensor[name].kind == "param"
        and graph.tensor[name].requires_grad
    }


def _tied_bytes(
    plan: Plan, graph: ModelGraph, tied: Mapping[str, Sequence[int]], mine: Sequence[int]
) -> int:
    """Bytes that summing the gradients of copies on several stages takes beside them."""
    total = 0
    for name, stages in tied.items():
        here = [stage for stage in stages if stage in mine]
        if not here:
            continue
        meta = graph.tensor[name]
        placed = param_placements(graph, plan, plan.stages[here[0]].pp_rank)[name]
        size = meta.bytes_at(1) // (plan.stage_tp(here[0]) if isinstance(placed, Shard) else 1)
        # The sum of the copies here, and the message that goes round.
        total += size * (1 if len(here) == len(stages) else 2)
    return total


def _walked(
    price: PlanPrice,
    costs: CostCache,
    schedule: Schedule,
    rank: int,
    edges: Sequence[Edge],
    tied: Mapping[str, Sequence[int]],
) -> MemoryParts:
    """Return the memory of a rank whose tensors nobody shards, from its byte walk."""
    plan, profile = price.plan, costs.profile
    mine = [s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank]
    replicas = plan.stage_dp(mine[0]) * plan.cp
    wide = MASTER_FACTOR if plan.precision == "bf16" else 1
    weights = join(price.loads[s] for s in mine)
    trained = int(weights.param_bytes)
    moments = walk_rank(
        schedule.jobs[rank],
        {s: stage_jobs(plan, costs, s, edges, accumulates=replicas > 1) for s in mine},
        lambda stage: plan.stages[stage].pp_rank,
        rank,
        receive_ahead=plan.receive_ahead,
    )
    worst = max(moments, key=lambda moment: moment.peak_bytes)
    gradients = wide * trained if replicas > 1 else worst.gradient_bytes
    # Fused or foreach steps hold one more copy of what they update.
    steps_here = profile.cluster.device_type != "cpu" and not plan.optimizer_on_host
    scratch = wide * trained if steps_here else 0
    after = max(scratch, _tied_bytes(plan, costs.graph, tied, mine) * wide) + wide * trained
    height = worst.peak_bytes - worst.gradient_bytes + gradients
    transient = worst.peak_bytes - worst.kept_bytes - worst.gradient_bytes - worst.buffer_bytes
    states = ADAMW_STATES * wide * trained + COUNTER_BYTES * int(weights.num_params)
    states += wide * trained if plan.precision == "bf16" else 0
    on_host: Any = max(moment.host_bytes for moment in moments)
    if plan.optimizer_on_host:
        states = 0
        on_host += host_state_bytes(weights, dp=replicas, sharded=False, precision=plan.precision)
    return with_overheads(
        MemoryParts(
            parameter_bytes=trained + int(weights.frozen_bytes),
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


def _sharded(price: PlanPrice, costs: CostCache, schedule: Schedule, rank: int) -> MemoryParts:
    """Return the memory of a rank whose tensors its replicas share (ZeRO)."""
    plan = price.plan
    mine = [s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank]
    replicas = plan.stage_dp(mine[0]) * plan.cp
    row = schedule.jobs[rank]
    stages = {
        s: _stage_bytes(
            plan.stages[s], price.loads[s], False, sharding=_sharding_bytes(price, s, replicas)
        )
        for s in mine
    }
    travels = trips(row, [s for s in mine if plan.stages[s].activations_on_host])
    worst = activation_peak(schedule, rank, stages, travels)
    parts = rank_memory(
        join(price.loads[s] for s in mine),
        kept=worst.kept_bytes,
        transient=worst.top_bytes,
        dp=replicas,
        zero_stage=plan.zero_stage,
        profile=costs.profile,
        receive_bytes=_receive_bytes(price.arrivals, mine),
        walked=True,
        batch_bytes=_batch_bytes(plan, costs.graph),
        gradients_then=worst.gradient_bytes,
        precision=plan.precision,
        optimizer_on_host=plan.optimizer_on_host,
    )
    on_host = np.zeros(len(row))
    for trip in travels:
        on_host[trip.leaving : trip.arriving + 1] += stages[trip.stage_index].moved
    return replace(parts, host_bytes=parts.host_bytes + float(on_host.max(initial=0.0)))


def _sharding_bytes(price: PlanPrice, stage: int, replicas: int) -> float:
    """Return how far a backward under ZeRO 2 or 3 rises above what its stage's microbatch keeps.

    As FSDP does it, at block b: gradients b has made so far, whole; the message the block
    before it (in backward: b + 1) was reduced from; under ZeRO 3 the weights of b and of
    b - 1, fetched ahead. At the end of b its activations, its weights and the other message
    are gone, and its gradients are there, in its own message, and as a shard.
    """
    plan, blocks = price.plan, price.blocks[stage]
    if plan.zero_stage < 2 or replicas == 1:
        return 0.0
    recompute = plan.stages[stage].recompute
    params = [0.0, *(float(block.param_bytes) for block in blocks)]
    # The last message of a backward is let go by the first block of the next one.
    params.append(params[1] if plan.num_microbatches > 1 else 0.0)
    wide = MASTER_FACTOR if plan.precision == "bf16" else 1
    before = highest = 0.0
    for index, block in enumerate(blocks, start=1):
        shared = 0.0
        if recompute == "none" and index > 1:
            shared = min(blocks[index - 2].tail_bytes, block.saved_bytes)
        before -= shared
        own = params[index]
        inside = float(job_peak_bytes(block, recompute=recompute)) - float(block.side_bytes)
        inside += float(block.gradient_rise_bytes)
        at_end = own + wide * own * (1 + 1 / replicas) + float(block.input_bytes)
        messages = wide * params[index + 1]
        gathered, ahead = (own, params[index - 1]) if plan.zero_stage == 3 else (0.0, 0.0)
        highest = max(highest, before + max(inside + messages + gathered, at_end) + ahead)
        before += float(kept_bytes(block, recompute=recompute)) - float(block.side_bytes)
    return max(0.0, highest - before)


def _stage_bytes(
    stage: StagePlan, load: StageLoad, preallocated: bool, *, sharding: float
) -> StageBytes:
    kept = float(kept_bytes(load, recompute=stage.recompute))
    peak = max(float(job_peak_bytes(load, recompute=stage.recompute)), kept + sharding)
    last = "none" if not stage.recompute_last else stage.recompute
    split = float(load.split_peak_bytes - load.saved_bytes)
    if stage.recompute != "none":
        # What waits for weight gradients was made again beside what was kept.
        split = max(split, peak - kept) + float(load.pending_bytes)
    return StageBytes(
        kept=kept,
        peak=peak,
        last_kept=float(kept_bytes(load, recompute=last)),
        last_peak=max(
            float(job_peak_bytes(load, recompute=last)),
            float(kept_bytes(load, recompute=last)) + sharding,
        ),
        gradient=0.0 if preallocated else float(load.param_bytes),
        split_on_top=split,
        pending=float(load.pending_bytes),
        moved=kept - float(load.side_bytes),
    )


def _receive_bytes(arrivals: Sequence[Arrivals], stages: Sequence[int]) -> int:
    """Buffers posted for the next message of each direction (the executor looks one job ahead)."""
    forward = max(arrivals[s].forward_bytes for s in stages)
    last = len(arrivals) - 1
    return forward + max(arrivals[s + 1].backward_bytes if s < last else 0 for s in stages)
