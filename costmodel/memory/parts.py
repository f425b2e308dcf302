"""Bytes one rank needs at its worst moment, in named parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from costmodel.time.communication import MASTER_FACTOR
from costmodel.time.offload import HOST_BUCKET_BYTES
from costmodel.time.stage import StageLoad
from planner.plan import Precision
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
    wide = MASTER_FACTOR if precision == "bf16" else 1
    stepped = wide * (weights.param_bytes / dp if sharded else weights.param_bytes)
    counters = COUNTER_BYTES * weights.num_params
    if sharded:
        return (ADAMW_STATES + 2) * stepped + counters
    most = np.maximum(HOST_BUCKET_BYTES, wide * weights.largest_param_bytes)
    buckets = np.minimum(_SLOTS * most, stepped)
    return (ADAMW_STATES + 1) * stepped + counters + buckets * (1 + 1 / wide)


_SLOTS = 2
_OUTSIDE = {"allocator_bytes", "context_bytes"}
