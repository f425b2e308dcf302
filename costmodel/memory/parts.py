"""The parts that a rank's memory is reported in, and what the allocator adds to them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from profiles import Profile
from profiles.profile import Amount

ADAMW_STATES, COUNTER_BYTES = 2, 4
"""AdamW keeps two moments in the dtype of what it steps, and counts the steps of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at its fullest moment; every part is a number or an array of numbers."""

    parameter_bytes: Amount = 0
    """Weights at rest or gathered, frozen parameters, buffers and constants."""
    gradient_bytes: Amount = 0
    """Gradients, buckets of gradients, or shards of them."""
    optimizer_bytes: Amount = 0
    """The optimizer's state, in bf16 with the fp32 masters."""
    activation_bytes: Amount = 0
    """What all microbatches in flight keep for their backwards."""
    transient_bytes: Amount = 0
    """What the job of that moment holds only while it runs, or the optimizer, if that is more."""
    communication_bytes: Amount = 0
    """Receive buffers posted ahead."""
    batch_bytes: Amount = 0
    """The global batch, which every rank is given whole."""
    allocator_bytes: Amount = 0
    """Rounding and fragmentation."""
    context_bytes: Amount = 0
    """The framework and the driver."""
    host_bytes: Amount = 0
    """Bytes of the host's memory at the height of that: no part of the total."""

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
    return replace(
        parts,
        allocator_bytes=parts.total * profile.allocator_overhead_fraction,
        context_bytes=profile.context_bytes,
    )
