"""Memory of each pp rank of a plan, at the worst moment of its row of the job table."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.boundary import Arrivals
from costmodel.cache import CostCache
from costmodel.memory import (
    MemoryParts,
    StageBytes,
    activation_peak,
    job_peak_bytes,
    kept_bytes,
    rank_memory,
)
from costmodel.plan_price import PlanPrice
from costmodel.stage import StageLoad, join
from planner.plan import StagePlan
from planner.schedule.jobs import Schedule


def plan_memory(price: PlanPrice, costs: CostCache, schedule: Schedule) -> tuple[MemoryParts, ...]:
    """Return the memory of each pp rank, from the job table's own order."""
    plan = price.plan
    graph = costs.graph
    batch_bytes = sum(graph.tensor[n].bytes_at(plan.global_batch) for n in graph.batch_inputs)
    parts = []
    for rank in range(plan.pp):
        mine = [s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank]
        replicas = plan.stage_dp(mine[0]) * plan.cp
        # Replicas without ZeRO accumulate in buckets made beforehand; others in what the first
        # backward of a stage leaves.
        preallocated = replicas > 1 and plan.zero_stage == 0
        worst = activation_peak(
            schedule,
            rank,
            {s: _stage_bytes(plan.stages[s], price.loads[s], preallocated) for s in mine},
        )
        parts.append(
            rank_memory(
                join(price.loads[s] for s in mine),
                kept=worst.kept_bytes,
                transient=worst.top_bytes,
                dp=replicas,
                zero_stage=plan.zero_stage,
                profile=costs.profile,
                receive_bytes=_receive_bytes(price.arrivals, mine),
                recompute=max((plan.stages[s].recompute for s in mine), key=_MOST_AGAIN.index),
                batch_bytes=batch_bytes,
                gradients_then=None if preallocated else worst.gradient_bytes,
                precision=plan.precision,
            )
        )
    return tuple(parts)


_MOST_AGAIN = ("none", "selective", "full")


def _stage_bytes(stage: StagePlan, load: StageLoad, preallocated: bool) -> StageBytes:
    kept = float(kept_bytes(load, recompute=stage.recompute))
    peak = float(job_peak_bytes(load, recompute=stage.recompute))
    last = "none" if not stage.recompute_last else stage.recompute
    split = float(load.split_peak_bytes - load.saved_bytes)
    if stage.recompute != "none":
        # What waits for weight gradients was made again beside what was kept.
        split = max(split, peak - kept) + float(load.pending_bytes)
    return StageBytes(
        kept=kept,
        peak=peak,
        last_kept=float(kept_bytes(load, recompute=last)),
        last_peak=float(job_peak_bytes(load, recompute=last)),
        gradient=0.0 if preallocated else float(load.param_bytes),
        split_on_top=split,
        pending=float(load.pending_bytes),
    )


def _receive_bytes(arrivals: Sequence[Arrivals], stages: Sequence[int]) -> int:
    """Buffers posted for the next message of each direction (the executor looks one job ahead)."""
    forward = max(arrivals[s].forward_bytes for s in stages)
    last = len(arrivals) - 1
    return forward + max(arrivals[s + 1].backward_bytes if s < last else 0 for s in stages)
