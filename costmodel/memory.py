"""Bytes one rank needs at its worst moment, in named parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from costmodel.stage import StageLoad
from planner.schedule.jobs import JobKind, Schedule
from profiles import Profile

Amount = Any
ADAMW_STATES = 2
"""AdamW keeps two moments in the parameter's dtype (its step counters are scalars)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank; every part is a number or an array of numbers.

    `activation_bytes` are kept for backward by all microbatches in flight at the worst
    moment, `transient_bytes` what the job of that moment (or the optimizer, if it needs
    more) has on top. `allocator_bytes` is rounding and fragmentation.
    """

    parameter_bytes: Amount = 0
    gradient_bytes: Amount = 0
    optimizer_bytes: Amount = 0
    activation_bytes: Amount = 0
    transient_bytes: Amount = 0
    communication_bytes: Amount = 0
    allocator_bytes: Amount = 0
    context_bytes: Amount = 0

    @property
    def tensor_bytes(self) -> Amount:
        """Bytes of live tensors, without allocator and context."""
        return self.total - self.allocator_bytes - self.context_bytes

    @property
    def total(self) -> Amount:
        """All parts together."""
        return sum(getattr(self, part.name) for part in fields(self))

    def to_dict(self) -> dict[str, int]:
        """Return the parts and their total as JSON data."""
        parts = {part.name: int(getattr(self, part.name)) for part in fields(self)}
        return {**parts, "total_bytes": int(self.total)}


def kept_bytes(load: StageLoad, *, recompute: bool) -> Amount:
    """Bytes a stage keeps for each microbatch in flight."""
    return (load.input_bytes if recompute else load.saved_bytes) + load.side_bytes


def job_peak_bytes(load: StageLoad, *, recompute: bool) -> Amount:
    """Highest bytes inside one microbatch's forward or backward, what it keeps included."""
    return (load.recompute_peak_bytes if recompute else load.saved_peak_bytes) + load.side_bytes


def stage_memory(
    load: StageLoad,
    *,
    in_flight: Amount,
    recompute: bool,
    dp: int,
    zero_stage: int,
    profile: Profile,
    receive_bytes: Amount = 0,
) -> MemoryParts:
    """Return the memory of a rank that holds one stage.

    `in_flight` microbatches are alive at most; all but the one in work keep
    `kept_bytes(load)`. `receive_bytes` are the buffers of messages posted ahead.
    """
    kept = kept_bytes(load, recompute=recompute)
    peak = np.maximum(job_peak_bytes(load, recompute=recompute), kept)
    return rank_memory(
        load,
        kept=in_flight * kept,
        transient=peak - kept,
        dp=dp,
        zero_stage=zero_stage,
        profile=profile,
        receive_bytes=receive_bytes,
    )


def rank_memory(
    weights: StageLoad,
    *,
    kept: Amount,
    transient: Amount,
    dp: int,
    zero_stage: int,
    profile: Profile,
    receive_bytes: Amount = 0,
) -> MemoryParts:
    """Return the memory of a rank whose stages together hold `weights`' parameters.

    ZeRO 1 and 2 keep shards of everything between steps and a gathered copy of the weights
    within one; ZeRO 3 gathers a block at a time, with the next one on its way.
    """
    trained, frozen = weights.param_bytes, weights.frozen_bytes
    sharded = zero_stage > 0 and dp > 1
    shard = trained / dp if sharded else trained
    if not sharded:
        parameters, gathered = trained + frozen, 0
    elif zero_stage < 3:
        parameters, gathered = shard + frozen, trained
    else:
        parameters, gathered = shard + frozen, np.minimum(2 * weights.largest_param_bytes, trained)
    gradients = shard if zero_stage >= 2 and dp > 1 else trained
    # The bucket a reduce-scatter packs, and the gradients of the block it comes from.
    buckets = 2 * weights.largest_param_bytes if sharded else 0
    states = ADAMW_STATES * shard
    # Fused or foreach steps hold one more copy of what they update.
    optimizer_scratch = shard if profile.cluster.device_type != "cpu" else 0
    transient = np.maximum(transient + buckets, optimizer_scratch - kept)
    parts = MemoryParts(
        parameter_bytes=parameters + gathered,
        gradient_bytes=gradients,
        optimizer_bytes=states,
        activation_bytes=kept,
        transient_bytes=transient,
        communication_bytes=receive_bytes,
    )
    return MemoryParts(
        **{f.name: getattr(parts, f.name) for f in fields(parts) if f.name not in _OUTSIDE},
        allocator_bytes=parts.total * profile.allocator_overhead_fraction,
        context_bytes=profile.context_bytes,
    )


_OUTSIDE = {"allocator_bytes", "context_bytes"}


def activation_peak(
    schedule: Schedule, pp_rank: int, *, kept: Sequence[float], peak: Sequence[float]
) -> tuple[float, float]:
    """Play one rank's row: return (bytes kept, bytes on top) at its worst moment.

    `kept[stage]` is what one microbatch keeps, `peak[stage]` the highest point within one
    of its jobs, kept bytes included. Holding until W errs on the safe side.
    """
    live = 0.0
    worst = (0.0, 0.0)
    for job in schedule.jobs[pp_rank]:
        stage = job.stage_index
        if job.kind is JobKind.FORWARD:
            live += kept[stage]
        on_top = max(0.0, peak[stage] - kept[stage])
        if live + on_top > sum(worst):
            worst = live, on_top
        if job.kind in (JobKind.FULL_BACKWARD, JobKind.BACKWARD_WEIGHT):
            live -= kept[stage]
    return worst
