"""Profile: one machine's numbers, ready to answer the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal, cast

import numpy as np

from planner.cluster import ClusterSpec
from profiles.calibration import LAUNCH, WAIT, Factors, collective_term, op_term, step_term
from profiles.devices import host_of
from profiles.hosts import REACHED_FRACTION, HostSpec
from profiles.lookup.collective_model import CollectiveModel
from profiles.lookup.families import pace_kind
from profiles.lookup.op_model import OpModel
from profiles.records import (
    Calibration,
    CollectiveRecord,
    Direction,
    Group,
    HostWork,
    Lookup,
    OpQuery,
    OpRecord,
    PaceKind,
    ProfileFile,
    StepWork,
)

Amount = Any
"""A float or an array of floats."""

PASSES: dict[StepWork, float] = {
    "adamw": 7,
    "sharded_adamw": 7,
    "cast": 1.5,
    "accumulate": 2.5,
    "host_to_device": 2,
    "device_to_host": 2,
    "zero_forward": 0,
    "zero_backward": 0,
    "zero_reduce": 0,
    "zero_gather": 0,
}
"""Bytes that cross memory for each byte of the float32 tensor. AdamW reads parameter,
gradient and two moments and writes all but the gradient; a bfloat16 copy is half a pass. FSDP2's
copies are counted with its messages (`costmodel.time.communication`); what it does besides, only
where it was measured."""


class Profile:
    """What a machine can do, measured or described. Loaded by `profiles.load_profile`."""

    groups: tuple[DeviceGroup, ...] = ()
    """The groups of devices of a cluster that has several (`GroupedProfile`)."""

    def __init__(
        self,
        file: ProfileFile,
        ops: Sequence[OpRecord] = (),
        collectives: Sequence[CollectiveRecord] = (),
    ) -> None:
        self.file = file
        self.ops = tuple(ops)
        self.collectives = tuple(collectives)
        self.factors = Factors.of(file.calibration)

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
    def allocator_range(self) -> tuple[float | None, float | None]:
        """Where that fraction lies from run to run, in eight of ten; None: it was not measured."""
        figure = self.file.allocator_overhead_fraction
        return figure.low, figure.high

    @property
    def expert_imbalance(self) -> float | None:
        """How unevenly ranks received rows for their experts in recorded runs (median of all);
        None where no run tells.
        """
        found = self.file.calibration
        runs = () if found is None else found.runs
        told = [run.expert_imbalance for run in runs if run.expert_imbalance is not None]
        return median(told) if told else None

    def calibration_of(self, runtime: str) -> Calibration | None:
        """Return what logs of a runtime taught; None where none were read."""
        return self.file.runtime_calibrations.get(runtime)

    def factors_of(self, runtime: str) -> dict[str, float]:
        """Return what logs of a runtime say of each kind of work; empty where none were read.

        They are on the rates of the device, of which the runtime's prices are made.
        """
        found = self.calibration_of(runtime)
        return {} if found is None else {t: factor.value for t, factor in found.factors.items()}

    @property
    def launch_overhead_s(self) -> float:
        """Least host time per operator: no op can be issued faster than this."""
        return self.file.launch_overhead_s.value * self.factors[LAUNCH]

    def host_seconds(
        self, direction: Direction, *, ops: int, products: int = 0, redistributions: int = 0
    ) -> float:
        """Return the host time to issue `ops` of a block's pass, some of them products with trained
        weights or redistributions, which take longer where that was measured.
        """
        work = self.file.host_work

        def each(kind: str, otherwise_s: float) -> float:
            figure = work.get(cast(HostWork, kind))
            return otherwise_s if figure is None else figure.value * self.factors[LAUNCH]

        op_s = each(f"{direction}_op", self.launch_overhead_s)
        more_s = products * max(0.0, each(f"product_{direction}", op_s) - op_s)
        more_s += redistributions * max(0.0, each(f"redistribute_{direction}", op_s) - op_s)
        return ops * op_s + more_s

    @cached_property
    def _op_model(self) -> OpModel:
        # A cluster of several kinds of devices is as slow as its slowest, which `cluster` is.
        mine = [record for record in self.ops if record.device == self.cluster.device]
        return OpModel(self.cluster, mine, self.file.op_fits)

    @cached_property
    def _collective_model(self) -> CollectiveModel:
        return CollectiveModel(self.cluster, self.collectives, self.file.collective_fits)

    def op_seconds(self, query: OpQuery) -> Lookup:
        """Return the time of one operator on one device, as slow as that typically is."""
        kind = pace_kind(query.target)
        factor = self.factors[op_term(kind, query.direction)]
        return self._op_model.seconds(query).times(self._slowdown(kind) * factor)

    def _slowdown(self, kind: PaceKind) -> float:
        """Return by how much work of a kind is typically slower than undisturbed."""
        figure = self.file.typical_slowdown.get(kind)
        return 1.0 if figure is None else figure.value

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the time of a collective; `num_bytes` is the full tensor's size.

        Raises ValueError for an unknown kind. A group of one rank costs nothing.
        """
        factor = self.factors[collective_term(kind, group)]
        return self._collective_model.seconds(kind, num_bytes, group).times(factor)

    def least_collective_s_per_byte(self, kind: str, group: Group, *, most_bytes: float) -> float:
        """Return seconds per byte that no collective of up to `most_bytes` goes below.

        Raises ValueError for an unknown kind.
        """
        least = self._collective_model.least_s_per_byte(kind, group, most_bytes=most_bytes)
        return least * self.factors[collective_term(kind, group)]

    def step_seconds(
        self, work: StepWork, *, num_bytes: float, num_tensors: int = 1, num_calls: int = 1
    ) -> Lookup:
        """Return the time of work beside the blocks; `num_bytes` of the float32 tensors, in
        `num_calls` blocks where it is a block's.

        Where it was not measured: its passes over memory, or the host's link, at full rate.
        """
        answer = self._step_seconds(work, num_bytes, num_tensors, num_calls)
        return answer.times(self.factors[step_term(work)])

    def _step_seconds(
        self, work: StepWork, num_bytes: float, num_tensors: int, num_calls: int
    ) -> Lookup:
        for fit in self.file.step_fits:
            if fit.work == work:
                undisturbed_s = (
                    num_calls * fit.s_per_call
                    + num_tensors * fit.s_per_tensor
                    + num_bytes * fit.s_per_byte
                )
                return Lookup(
                    seconds=undisturbed_s * self._slowdown("light"),
                    source=f"{work}, {fit.origin}",
                    relative_error=fit.relative_error,
                )
        if work in ("host_to_device", "device_to_host") and self.cluster.device_type != "cpu":
            return Lookup(
                seconds=num_bytes / self.host.link_bytes_per_s,
                source=f"{work}, {self.host.source}",
                relative_error=1.0,
            )
        return Lookup(
            seconds=PASSES[work] * num_bytes / self.cluster.memory_bytes_per_s,
            source=f"{work}, passes over memory at its peak rate",
            relative_error=0.3,
        )

    def wait_seconds(
        self, compute_s: Amount, num_collectives: Amount, *, inside: bool = False
    ) -> Amount:
        """Return by how much so many collectives, spread over seconds of compute, take longer
        than one after another, as ranks wait for each other; 0 if not measured.

        Numbers or arrays. `inside` a block comes what the runtime does around each.
        """
        fit = self.file.collective_wait
        if fit is None:
            return 0.0 * num_collectives
        among = compute_s * fit.s_per_compute_s * (num_collectives > 0)
        each = fit.s_per_call + (fit.s_per_redistribution if inside else 0.0)
        calls = num_collectives
        if fit.least_compute_s:
            # With less compute between two calls than was measured, each waits that part of the
            # time: caches are still warm and no rank is late.
            calls = np.minimum(calls, compute_s / fit.least_compute_s)
        return (calls * each + among) * self.factors[WAIT]

    def optimizer_seconds(
        self, *, param_bytes: float, num_tensors: int, sharded: bool = False
    ) -> Lookup:
        """Return one AdamW step over a rank's float32 parameters; `sharded` ones are DTensors."""
        return self.step_seconds(
            "sharded_adamw" if sharded else "adamw", num_bytes=param_bytes, num_tensors=num_tensors
        )

    @cached_property
    def host(self) -> HostSpec:
        """What the host of a node is taken to be."""
        return host_of(self.cluster.device)

    def host_optimizer_seconds(
        self, *, param_bytes: float, weight_bytes: float, num_tensors: int, sharded: bool = False
    ) -> Lookup:
        """Return one AdamW step on the host over float32 copies of `param_bytes`, from which
        weights of `weight_bytes` are written; all devices of a node are at it at once.
        `sharded` copies are DTensors, from which FSDP2 reads them itself.
        """
        if self.cluster.device_type == "cpu":
            update = self.optimizer_seconds(
                param_bytes=param_bytes, num_tensors=num_tensors, sharded=sharded
            )
            if sharded:
                return update
            written = self.step_seconds("cast", num_bytes=param_bytes, num_tensors=num_tensors)
            return replace(update, seconds=update.seconds + written.seconds)
        host, share = self.host, self.cluster.devices_per_node
        passes = PASSES["adamw"] * param_bytes
        if not sharded:
            # The masters are read again, and the weights made of them written.
            passes += param_bytes + weight_bytes
        return Lookup(
            seconds=passes * share / (host.memory_bytes_per_s * REACHED_FRACTION),
            source=f"passes over the host's memory, {host.source}",
            relative_error=0.5,
        )

    def block_correction(self, direction: Direction, *, compiled: bool = False) -> float:
        """Return measured time of whole blocks over the sum of their ops; 1 if not measured.

        `compiled` blocks went through torch.compile.
        """
        file = self.file
        known = file.compiled_block_correction if compiled else file.block_correction
        figure = known.get(direction)
        return 1.0 if figure is None else figure.value

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether whole compiled blocks were measured on its machine."""
        return bool(self.file.compiled_block_correction)

    def overlap_slowdown(self, part: Literal["compute", "communication"]) -> float:
        """Return by how much a part slows while both run together; 1 if not measured."""
        figure = self.file.overlap_slowdown.get(part)
        return 1.0 if figure is None else figure.value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices of one kind, in nodes of equal size.

    `profile` is that of the group's devices and links, up to what leaves the group.
    """

    name: str
    profile: Profile
    num_devices: int


class GroupedProfile(Profile):
    """A cluster of several groups; asked as one machine, it answers as its first group."""

    def __init__(self, name: str, groups: Sequence[DeviceGroup]) -> None:
        first = groups[0].profile
        super().__init__(first.file, first.ops, first.collectives)
        self.groups = tuple(groups)
        self._name = name

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return self._name
