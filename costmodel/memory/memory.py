"""Bytes one rank needs at its worst moment, in named parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from costmodel.time.offload import HOST_BUCKET_BYTES
from costmodel.time.stage_costs.load import StageLoad
from planner.plan import Precision, Recompute
from planner.plan.replication import gradient_factor
from profiles import Profile
from profiles.profile import Amount

ADAMW_STATES, COUNTER_BYTES = 2, 4
"""AdamW keeps two moments in the dtype of what it steps, and counts the steps of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank; every part is a number or an array of numbers.

    `activation_bytes` are kept for backward by all microbatches in flight at the worst
    moment, `transient_bytes` what the job of that moment (or the optimizer, if it needs
    more) has on top, `batch_bytes` the global batch, which every rank is given whole.
    `allocator_bytes` is rounding and fragmentation. `host_bytes`, of the host's memory and at
    the height of that, are no part of the total.
    """

    parameter_bytes: Amount = 0
    gradient_bytes: Amount = 0
    optimizer_bytes: Amount = 0
    activation_bytes: Amount = 0
    transient_bytes: Amount = 0
    communication_bytes: Amount = 0
    batch_bytes: Amount = 0
    allocator_bytes: Amount = 0
    context_bytes: Amount = 0
    host_bytes: Amount = 0

    @property
    def tensor_bytes(self) -> Amount:
        """Bytes of live tensors, without allocator and context."""
        return self.total - self.allocator_bytes - self.context_bytes

    @property
    def total(self) -> Amount:
        """All parts together."""
        return sum(getattr(self, part.name) for part in fields(self) if part.name != "host_bytes")

    def to_dict(self) -> dict[str, int]:
        """Return the parts and their total as JSON data."""
        parts = {part.name: int(getattr(self, part.name)) for part in fields(self)}
        return {**parts, "total_bytes": int(self.total)}


def kept_bytes(load: StageLoad, *, recompute: Recompute) -> Amount:
    """Bytes a stage keeps for each microbatch in flight."""
    kept = {
        "none": load.saved_bytes,
        "selective": load.selective_bytes,
        "full": load.input_bytes,
    }
    return kept[recompute] + load.side_bytes


def job_peak_bytes(load: StageLoad, *, recompute: Recompute) -> Amount:
    """Highest bytes inside one microbatch's forward or backward, what it keeps included."""
    peak = {
        "none": load.saved_peak_bytes,
        "selective": load.selective_peak_bytes,
        "full": load.recompute_peak_bytes,
    }
    return peak[recompute] + load.side_bytes


def stage_memory(
    load: StageLoad,
    *,
    in_flight: Amount,
    recompute: Recompute,
    dp: int,
    zero_stage: int,
    profile: Profile,
    receive_bytes: Amount = 0,
    batch_bytes: int = 0,
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
        batch_bytes=batch_bytes,
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
    batch_bytes: int = 0,
    gradients_then: Amount | None = None,
    precision: Precision = "model",
    optimizer_on_host: bool = False,
) -> MemoryParts:
    """Return the memory of a rank whose stages together hold `weights`' parameters.

    `gradients_then` are the gradients that exist at the worst moment (all, when None), in
    bytes of the parameters. In bf16 gradients are summed in fp32, and the optimizer has fp32
    masters beside its state.
    ZeRO 1 and 2 keep shards of everything between steps and a gathered copy of the weights
    within one; ZeRO 3 gathers a block at a time, with the next one on its way. That and the
    messages not yet reduced are guessed from the largest block. With `optimizer_on_host` masters
    and state are there, and with ZeRO the shards of weights and gradients too
    (`planner.runtime.state.zero`).
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
    wide = gradient_factor(precision)
    if sharded and precision == "bf16":
        parameters = parameters - shard  # what FSDP shards are the masters
    every_gradient = wide * (shard if zero_stage >= 2 and dp > 1 else trained)
    gradients = every_gradient
    if gradients_then is not None:
        gradients = np.minimum(wide * gradients_then, every_gradient)
    buckets: Amount = 0
    if sharded and zero_stage >= 2:
        # The message that the block before was reduced from.
        buckets = wide * weights.largest_param_bytes
    masters = wide * shard if precision == "bf16" else 0
    states = ADAMW_STATES * wide * shard + COUNTER_BYTES * weights.num_params + masters
    on_host: Amount = 0
    if optimizer_on_host:
        on_host = host_state_bytes(weights, dp=dp, sharded=sharded, precision=precision)
        states = 0
        if sharded:
            parameters = frozen
            if zero_stage >= 2:  # sums of gradients are shards
                gradients, every_gradient = 0 * gradients, 0 * every_gradient
    # Fused or foreach steps hold one more copy of what they update.
    steps_here = profile.cluster.device_type != "cpu" and not optimizer_on_host
    optimizer_scratch = wide * shard if steps_here else 0
    at_update = optimizer_scratch + every_gradient - gradients - kept
    transient = np.maximum(transient + buckets, at_update)
    parts = MemoryParts(
        parameter_bytes=parameters + gathered,
        gradient_bytes=gradients,
        optimizer_bytes=states,
        activation_bytes=kept,
        transient_bytes=transient,
        communication_bytes=receive_bytes,
        batch_bytes=batch_bytes,
        host_bytes=on_host,
    )
    return with_overheads(parts, profile)


def with_overheads(parts: MemoryParts, profile: Profile) -> MemoryParts:
    """Add to live tensors what the allocator loses on them, and the context."""
    return MemoryParts(
        **{f.name: getattr(parts, f.name) for f in fields(parts) if f.name not in _OUTSIDE},
        allocator_bytes=parts.total * profile.allocator_overhead_fraction,
        context_bytes=profile.context_bytes,
    )


def host_state_bytes(weights: StageLoad, *, dp: int, sharded: bool, precision: Precision) -> Amount:
    """Return what an optimizer on the host has there, its state and what it steps on.

    Without ZeRO that is a copy of the weights, and slots for two buckets of gradients and of
    weights on their way (`planner.runtime.state.host_optimizer`); a bucket is at least as large as
    the largest tensor, for which the largest block stands. With ZeRO: shards of both.
    """
    wide = gradient_factor(precision)
    stepped = wide * (weights.param_bytes / dp if sharded else weights.param_bytes)
    counters = COUNTER_BYTES * weights.num_params
    if sharded:
        return (ADAMW_STATES + 2) * stepped + counters
    most = np.maximum(HOST_BUCKET_BYTES, wide * weights.largest_param_bytes)
    buckets = np.minimum(_SLOTS * most, stepped)
    return (ADAMW_STATES + 1) * stepped + counters + buckets * (1 + 1 / wide)


_SLOTS = 2
_OUTSIDE = {"allocator_bytes", "context_bytes"}
