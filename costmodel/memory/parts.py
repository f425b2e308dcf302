"""The words of both fidelities: the parts that a rank's memory is reported in, what the allocator
adds to them, and how the ranks of a stage keep and update its state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter

from costmodel.execution import Execution
from planner.language.plan.parts import low_dtype
from planner.language.plan.replication import Replication
from profiles import Profile
from profiles.profile import Amount

ADAMW_STATES, COUNTER_BYTES = 2, 4
"""AdamW keeps two moments in the dtype of what it steps, and counts the steps of each tensor."""


def keeps_sums(replication: Replication, *, sums_stay: bool) -> bool:
    """Return whether whole sums of gradients exist all the time, in a runtime whose sums stay.

    ZeRO 2 and 3 keep shards of them; with the optimizer on the host, sums leave the device.
    """
    return sums_stay and replication.zero_stage < 2 and not replication.optimizer_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(Replication):
    """How the ranks of a stage keep and update its state: all that resident bytes depend on beside
    sizes.
    """

    on_gpu: bool
    """Whether they have devices apart from their host."""
    runtime_copies: bool
    """Whether the runtime's step of the optimizer copies what it steps on
    (`Execution.copies_update`)."""
    sum_factor: int
    """Bytes of a gradient's sum over those of its parameter (`Execution.sum_factor`)."""
    moments_factor: float
    """Bytes of the optimizer's moments over those of their parameter
    (`Execution.moments_factor`)."""
    master_factor: int
    """Bytes of the optimizer's copy of a parameter over those of the parameter; 0 where it steps on
    the parameter itself (`Execution.master_factor`)."""
    sums_stay: bool
    """Whether the runtime's sums of gradients stay from step to step (`Execution.sums_stay`)."""
    bucket_factor: int
    """Bytes of a gradient in buckets beside the sums over those of its parameter
    (`Execution.bucket_factor`)."""

    @classmethod
    def under(cls, replication: Replication, execution: Execution, profile: Profile) -> Ranks:
        """Return the ranks that share a stage so, as a runtime trains them on a device."""
        return cls(
            **{field.name: getattr(replication, field.name) for field in fields(replication)},
            on_gpu=profile.cluster.device_type != "cpu",
            runtime_copies=execution.copies_update,
            sum_factor=execution.sum_factor(replication.precision),
            moments_factor=execution.moments_factor(replication.precision),
            master_factor=execution.master_factor(replication.precision),
            sums_stay=execution.sums_stay,
            bucket_factor=execution.bucket_factor(replication.precision),
        )

    @property
    def has_buckets(self) -> bool:
        """Whether whole sums of gradients exist through the whole step."""
        return self.sums_in_buckets or keeps_sums(self, sums_stay=self.sums_stay)

    @property
    def sums_in_buckets(self) -> bool:
        """Whether replicas without ZeRO sum gradients, in buckets that exist all the time."""
        return not self.is_sharded and self.replicas > 1

    @property
    def shards_frozen(self) -> bool:
        """Whether ZeRO shards frozen parameters, too: ZeRO 3 alone does."""
        return self.is_sharded and self.zero_stage == 3

    @property
    def rests_elsewhere(self) -> bool:
        """Whether no weights are at rest on the device: FSDP2 shards the fp32 masters of 16-bit
        weights, which are optimizer state here, and with the optimizer on the host the shards are
        there.
        """
        return self.is_sharded and (bool(low_dtype(self.precision)) or self.optimizer_on_host)

    @property
    def optimizer_factor(self) -> float:
        """Bytes of optimizer state on the device over those of the parameters: AdamW's two moments,
        and of 16-bit weights the fp32 masters.
        """
        if self.optimizer_on_host:
            return 0
        return self.moments_factor + self.master_factor

    @property
    def copies_update(self) -> bool:
        """Whether the optimizer's step copies what it steps on: fused and foreach steps of a GPU,
        and sums that are widened for it. A CPU's loop over parameters makes no copy worth counting,
        and a step that keeps no fp32 copy of its weights takes narrow sums as they are.
        """
        widens = self.sum_factor < self.gradient_factor and self.master_factor != 1
        copies = self.runtime_copies or widens
        return self.on_gpu and copies and not self.optimizer_on_host


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
    """Receive buffers posted ahead; on a GPU also those freed that its streams still keep."""
    batch_bytes: Amount = 0
    """What a rank is given of the batch: all of it, or a microbatch at a time."""
    allocator_bytes: Amount = 0
    """Rounding and fragmentation."""
    context_bytes: Amount = 0
    """The framework and the driver, with the communicators."""
    host_bytes: Amount = 0
    """Bytes of the host's memory at the height of that: no part of the total."""

    @property
    def tensor_bytes(self) -> Amount:
        """Bytes of live tensors, without allocator and context."""
        return self.total - self.allocator_bytes - self.context_bytes

    @property
    def total(self) -> Amount:
        """All parts together."""
        return sum(_counted(self))

    def to_dict(self) -> dict[str, int]:
        """Return the parts and their total as JSON data."""
        parts = {part.name: int(getattr(self, part.name)) for part in fields(self)}
        return {**parts, "total_bytes": int(self.total)}


# Of each job of a plan there is a total: the names are looked up once. Host memory has a limit of
# its own, so it is no part of the total.
_counted = attrgetter(*(part.name for part in fields(MemoryParts) if part.name != "host_bytes"))


def with_overheads(
    parts: MemoryParts, profile: Profile, *, communicator_bytes: int = 0
) -> MemoryParts:
    """Add to live tensors what the allocator loses on them, and the context, which communicators
    are a part of.
    """
    return replace(
        parts,
        # Rounding and fragmentation grow with live tensors; the context is not the allocator's.
        allocator_bytes=parts.total * profile.allocator_overhead_fraction,
        context_bytes=profile.context_bytes + communicator_bytes,
    )
