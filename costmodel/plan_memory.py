"""Memory of each pp rank of a plan, at the worst moment of its row of the job table."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.boundary import Arrivals
from costmodel.cache import CostCache
from costmodel.communication import MASTER_FACTOR
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
            {
                s: _stage_bytes(
                    plan.stages[s],
                    price.loads[s],
                    preallocated,
                    sharding=_sharding_bytes(price, s, replicas),
                )
                for s in mine
            },
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
                walked=True,
                batch_bytes=batch_bytes,
                gradients_then=None if preallocated else worst.gradient_bytes,
                precision=plan.precision,
            )
        )
    return tuple(parts)


def _sharding_bytes(price: PlanPrice, stage: int, replicas: int) -> float:
    """Return how far a backward under ZeRO 2 or 3 rises above what its stage's microbatch keeps.

    As FSDP does it, at block b: gradients b has made so far, whole; the message the block
    before it (in backward: b + 1) was reduced from; under ZeRO 3 the weights of b and of
    b - 1, fetched ahead. At the end of b its activations are gone, and its gradients are
    there, in the message, and as a shard.
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
        at_end = wide * own * (2 + 1 / replicas) + float(block.input_bytes)
        messages = wide * params[index + 1]
        gathered = own + params[index - 1] if plan.zero_stage == 3 else 0.0
        highest = max(highest, before + max(inside, at_end) + messages + gathered)
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
    )


def _receive_bytes(arrivals: Sequence[Arrivals], stages: Sequence[int]) -> int:
    """Buffers posted for the next message of each direction (the executor looks one job ahead)."""
    forward = max(arrivals[s].forward_bytes for s in stages)
    last = len(arrivals) - 1
    return forward + max(arrivals[s + 1].backward_bytes if s < last else 0 for s in stages)
