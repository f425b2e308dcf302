"""Profile: one machine's numbers, ready to answer the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from planner.cluster import ClusterSpec
from profiles.collective_model import CollectiveModel
from profiles.op_model import OpModel
from profiles.records import (
    CollectiveRecord,
    Direction,
    Group,
    Lookup,
    OpQuery,
    OpRecord,
    ProfileFile,
)

ADAMW_PASSES = 7


class Profile:
    """What a machine can do, measured or described. Loaded by `profiles.load_profile`."""

    def __init__(
        self,
        file: ProfileFile,
        ops: Sequence[OpRecord] = (),
        collectives: Sequence[CollectiveRecord] = (),
    ) -> None:
        self.file = file
        self.ops = tuple(ops)
        self.collectives = tuple(collectives)

    @property
    def name(self) -> str:
        """Name of a shipped profile, or of the machine a measured one is of."""
        return self.file.name

    @property
    def source(self) -> str:
        """``measured`` on the machine itself, or ``shipped`` from published figures."""
        return self.file.source

    @cached_property
    def cluster(self) -> ClusterSpec:
        """The machines and links."""
        return self.file.cluster.spec(self.name)

    @property
    def memory_bytes(self) -> float:
        """Memory of one device that a training process can use, context included."""
        return self.file.cluster.memory_bytes.value

    @property
    def context_bytes(self) -> float:
        """What the framework, the device context and the communicators take per process."""
        return self.file.context_bytes.value

    @property
    def allocator_overhead_fraction(self) -> float:
        """Rounding and fragmentation: extra memory over the bytes of live tensors."""
        return self.file.allocator_overhead_fraction.value

    @property
    def launch_overhead_s(self) -> float:
        """Least host time per operator: no op can be issued faster than this."""
        return self.file.launch_overhead_s.value

    @cached_property
    def _op_model(self) -> OpModel:
        # A cluster of several kinds of devices is as slow as its slowest, which `cluster` is.
        mine = [record for record in self.ops if record.device == self.cluster.device]
        return OpModel(self.cluster, mine, self.file.op_fits)

    @cached_property
    def _collective_model(self) -> CollectiveModel:
        return CollectiveModel(self.cluster, self.collectives, self.file.collective_fits)

    def op_seconds(self, query: OpQuery) -> Lookup:
        """Return the time of one operator on one device."""
        return self._op_model.seconds(query)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the time of a collective; `num_bytes` is the full tensor's size.

        Raises ValueError for an unknown kind. A group of one rank costs nothing.
        """
        return self._collective_model.seconds(kind, num_bytes, group)

    def optimizer_seconds(
        self, *, param_bytes: float, num_tensors: int, sharded: bool = False
    ) -> Lookup:
        """Return one AdamW step over a rank's parameters; `sharded` ones are DTensors (ZeRO).

        Where it was not measured: seven passes over memory (parameter, gradient and two
        moments read, all but the gradient written) at the device's rate.
        """
        for fit in self.file.optimizer_fits:
            if fit.sharded == sharded:
                return Lookup(
                    seconds=num_tensors * fit.s_per_tensor + param_bytes * fit.s_per_byte,
                    source=f"AdamW, {fit.origin}",
                    relative_error=fit.relative_error,
                )
        return Lookup(
            seconds=ADAMW_PASSES * param_bytes / self.cluster.memory_bytes_per_s,
            source="AdamW, passes over memory at its peak rate",
            relative_error=0.3,
        )

    def block_correction(self, direction: Direction) -> float:
        """Return measured time of whole blocks over the sum of their ops; 1 if not measured."""
        figure = self.file.block_correction.get(direction)
        return 1.0 if figure is None else figure.value

    def overlap_slowdown(self, part: Literal["compute", "communication"]) -> float:
        """Return by how much a part slows while both run together; 1 if not measured."""
        figure = self.file.overlap_slowdown.get(part)
        return 1.0 if figure is None else figure.value
