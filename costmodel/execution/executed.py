"""A profile in the middle of a training step: of our runtime, or of another.

Published tables of single operators and collectives tell what each reaches alone, on one node.
Whole training runs tell what is left of that beside everything else, and the rates fitted to
them (`costmodel.table.kernels.DeviceRates`) are physical, so a captured graph is priced with them
too (`TrainingProfile`):

    op             seconds * (1 + node_spread * log2(nodes))     never under flop / sustained rate
    collective     seconds / (link_efficiency inside a node, network_efficiency between nodes)
    hidden message max(exposed_part * seconds, seconds - compute beside it)

A profile measured on the user's own machine has what it saw in it, and is left as it is.

Of other runtimes every time comes from the rates (`ExecutedProfile`): they say what a kernel of a
size takes, the `Execution` says which kernels there are and what they run beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2
from typing import Literal

import numpy as np

from costmodel.execution.casts import CASTS, Casts
from costmodel.execution.dispatch.dispatcher import Dispatcher, find_dispatcher
from costmodel.execution.execution import Execution, Overlapped
from costmodel.table.kernels import DeviceRates, has_rates, load_rates
from planner.errors import PlannerError
from planner.language.graph import Op
from planner.language.ops.families.products.narrow import NARROW_DTYPE, scaling_of
from profiles import Group, Lookup, OpQuery, Profile
from profiles.calibration import op_term
from profiles.lookup.families import MATMUL, family_of, pace_kind
from profiles.profile import Amount
from profiles.records import StepWork

OPTIMIZER_KERNELS = 20
"""Launches of an optimizer's step over flat buffers."""

HOST_SHARPNESS = 4
"""How sharply a phase turns from waiting for the device to waiting for the host: where both are
as slow, it takes 2 ** (1/4) times as long as either."""

TINY_S = 1e-12
"""Less than any phase with work takes."""

FP32_BYTES = 4
"""Callers give the bytes of fp32 tensors; passes over memory are counted by elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSeconds:
    """Device seconds of a kernel, and how many launches it is."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    """Part of the backward that makes gradients of weights."""
    kernels: int = 1

    def with_other(self, other: KernelSeconds) -> KernelSeconds:
        """Return the seconds of both, one after the other, without what is of weights."""
        return KernelSeconds(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
        )


class TrainingProfile(Profile):
    """A profile whose answers are those of a step on so many nodes."""

    def __init__(self, profile: Profile, rates: DeviceRates, num_nodes: int) -> None:
        super().__init__(profile.file, profile.ops, profile.collectives)
        self.alone = profile
        self.factors = profile.factors
        self.rates = rates
        self.num_nodes = num_nodes
        # All nodes wait for the slowest, which falls behind as much again at each doubling of their
        # number.
        self.waited = 1.0 + rates.node_spread * log2(num_nodes)

    def op_seconds(self, query: OpQuery) -> Lookup:
        """Return an operator's time on the slowest of all nodes, at the clocks they sustain."""
        answer = self.alone.op_seconds(query)
        peak = self.rates.peak_flop_per_s.get(query.dtype)
        # A table of short benchmarks may promise more than clocks sustain in a long step: a product
        # never beats the rate that training runs showed.
        if peak is not None and answer.source != "measured" and family_of(query.target) == MATMUL:
            # What runs showed of a device is beyond the rate of the fit as well.
            factor = self.factors[op_term(pace_kind(query.target), query.direction)]
            reached = self.rates.matmul_efficiency
            if query.dtype.startswith("float8"):
                reached *= self.rates.low_precision_efficiency
            least_s = factor * query.flop / (peak * reached)
            if answer.seconds < least_s:
                answer = replace(answer, seconds=least_s)
        return answer.times(self.waited)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the time of a collective beside compute."""
        answer = self.alone.collective_seconds(kind, num_bytes, group)
        return replace(answer, seconds=answer.seconds / self._reached_part(group))

    def least_collective_s_per_byte(self, kind: str, group: Group, *, most_bytes: float) -> float:
        """Return seconds per byte that no collective of up to `most_bytes` goes below."""
        least = self.alone.least_collective_s_per_byte(kind, group, most_bytes=most_bytes)
        return least / self._reached_part(group)

    def _reached_part(self, group: Group) -> float:
        """Return what part of its links' rate a group reaches."""
        inside = group.num_nodes == 1
        return self.rates.link_efficiency if inside else self.rates.network_efficiency

    def overlap_slowdown(self, part: Literal["compute", "communication"]) -> float:
        """Return by how much a part slows while both run together.

        A message of t seconds that costs the compute beside it exposed_part * t slows it by
        1 / (1 - exposed_part) while it lasts.
        """
        if self.file.overlap_slowdown:
            return super().overlap_slowdown(part)
        # With s_M = 1 the formula of `exposed_seconds` then gives exposed_part of the message.
        return 1.0 / (1.0 - self.rates.exposed_part) if part == "compute" else 1.0


class ExecutedProfile(TrainingProfile):
    """What a machine takes inside steps of a runtime on so many nodes."""

    def __init__(
        self,
        profile: Profile,
        rates: DeviceRates,
        *,
        num_nodes: int,
        execution: Execution,
        product_dtype: str = "bfloat16",
    ) -> None:
        super().__init__(profile, rates, num_nodes)
        self.execution = execution
        self.product_dtype = product_dtype
        """Dtype in which layers multiply: fp8 where the runtime casts for it."""
        self.dispatcher = find_dispatcher(execution.dispatchers[0])
        """What brings rows to their experts."""

    def with_dispatcher(self, dispatcher: Dispatcher) -> ExecutedProfile:
        """Return the same profile where rows of experts go by another dispatcher."""
        other = copy(self)
        other.dispatcher = dispatcher
        return other

    def with_rates(self, factors: Mapping[str, float]) -> ExecutedProfile:
        """Return the same profile where kinds of work take so many times as long."""
        return ExecutedProfile(
            self.alone,
            self.rates.slowed(factors),
            num_nodes=self.num_nodes,
            execution=self.execution,
            product_dtype=self.product_dtype,
        )

    @property
    def multiplies_narrow(self) -> bool:
        """Whether layers multiply in 8 bits or fewer, which the device can."""
        is_narrow = self.product_dtype.startswith(("float8", "float4"))
        return is_narrow and self.product_dtype in self.rates.peak_flop_per_s

    @property
    def casts(self) -> Casts | None:
        """What casts for products in 8 bits move; None where layers multiply in 16."""
        return CASTS[self.execution.scaling] if self.multiplies_narrow else None

    def casts_of(self, op: Op) -> Casts | None:
        """What casts of a product in 8 bits move: as a plan has it, by the kernels of the runtime's
        library of layers; None where it is in 16.
        """
        scaling = scaling_of(op)
        if not scaling or NARROW_DTYPE not in self.rates.peak_flop_per_s:
            return self.casts
        # Transformer Engine's where it has the runtime's layers, else torchao's.
        if CASTS[self.execution.scaling].saves_narrow:
            scaling = {"tensorwise": "current", "blocks": "blocks-kept"}.get(scaling, scaling)
        return CASTS[scaling]

    def _reached_part(self, group: Group) -> float:
        """Return what part of its links' rate a group reaches."""
        if group.num_nodes == 1:
            # A device that borrows another's tables has its own links: theirs over the table's.
            return self.rates.link_efficiency * self.rates.link_scale
        return self.rates.network_efficiency

    def pass_seconds(self, num_bytes: float, kernels: int = 1) -> float:
        """Return seconds of kernels that only move bytes, on the slowest node."""
        return self.rates.pass_seconds(num_bytes, kernels) * self.waited

    def step_seconds(
        self, work: StepWork, *, num_bytes: float, num_tensors: int = 1, num_calls: int = 1
    ) -> Lookup:
        """Return the time of work beside the blocks; `num_bytes` of the fp32 tensors."""
        elements = num_bytes / FP32_BYTES
        moved, kernels = {
            "accumulate": (self.execution.accumulate_bytes * elements, 0),
            "adamw": (self.execution.optimizer_pass_bytes * elements, OPTIMIZER_KERNELS),
            "sharded_adamw": (self.execution.optimizer_pass_bytes * elements, OPTIMIZER_KERNELS),
        }.get(work, (0.0, 0))
        if work in ("host_to_device", "device_to_host"):
            return super().step_seconds(
                work, num_bytes=num_bytes, num_tensors=num_tensors, num_calls=num_calls
            )
        seconds = self.rates.pass_seconds(moved, kernels)
        if kernels:
            # What the host does once a step comes with the optimizer's.
            needed_s = self.execution.step_kernels * self.rates.issue_s
            seconds += host_seconds(self.execution, seconds, needed_s)
        return Lookup(
            seconds=seconds, source=f"{work} of {self.execution.name}", relative_error=0.2
        )

    def shown_seconds(self, kind: Overlapped, seconds: float, *, behind_s: float) -> float:
        """Return what shows of collectives of a kind that has so much compute beside it."""
        if kind not in self.execution.overlaps:
            return seconds
        return self.rates.exposed_seconds(seconds, behind_s=behind_s)

    def skew_seconds(self, size: int) -> float:
        """Return what ranks wait for the last of them at a collective that nothing overlaps."""
        # The last of twice as many ranks is later by a constant more.
        return self.rates.skew_s * log2(size)


def host_seconds(execution: Execution, busy_s: float, needed_s: float) -> float:
    """Return what the host adds to a phase in which the device is busy and the host is needed.

    Some kernels last longer than the launch of the next, others do not, and only so much can be
    queued: near the point where both take as long, device and host wait for each other in turn.
    """
    if execution.launches_block:
        return needed_s
    slower = max(busy_s, needed_s)
    if not slower:
        return 0.0
    # A norm of both times, 4 for sharpness: (busy^4 + needed^4)^(1/4). Over the slower one, so that
    # no power leaves the range of floats.
    parts = (busy_s / slower) ** HOST_SHARPNESS + (needed_s / slower) ** HOST_SHARPNESS
    return slower * parts ** (1 / HOST_SHARPNESS) - busy_s


def waited_for_host(needed_s: float, phase_s: Amount, host_s: Amount) -> Amount:
    """Return how much longer a phase takes for which the host is needed `needed_s` longer.

    The phase takes `phase_s`, of which the device waits `host_s` for the host already. To first
    order of t = (d^4 + h^4)^(1/4) it is needed_s * dt/dh = needed_s * (h / t)^3: nothing where the
    device sets the pace, all of it where the host does.
    """
    if not needed_s:
        return 0 * phase_s
    busy_part = 1 - np.asarray(host_s) / np.maximum(phase_s, TINY_S)
    power = 1 - 1 / HOST_SHARPNESS
    waited: Amount = needed_s * (1 - np.clip(busy_part, 0, 1) ** HOST_SHARPNESS) ** power
    return waited


def in_training(profile: Profile, num_devices: int) -> Profile:
    """Return what a shipped profile answers inside steps on so many devices.

    Itself where it is measured, is in training already, or no published runs of its device tell.
    """
    return _in_training(profile, ceil(num_devices / profile.cluster.devices_per_node))


@lru_cache(maxsize=32)
def _in_training(profile: Profile, num_nodes: int) -> Profile:
    if type(profile) is Profile and profile.source == "shipped" and has_rates(profile):
        return TrainingProfile(profile, load_rates(profile), num_nodes)
    return profile


def rated_profile(profile: Profile) -> ExecutedProfile:
    """Return a profile as what `executed` made it, where an execution's prices are rates."""
    assert isinstance(profile, ExecutedProfile), f"{profile.name} was not made by `executed`"
    return profile


def executed(profile: Profile, execution: Execution, num_devices: int) -> Profile:
    """Return what a profile answers inside a runtime's steps on so many devices.

    Where its prices are the profile's, the same as `in_training`. Raises PlannerError for a profile
    whose device no published runs told.
    """
    if execution.prices == "profile":
        return in_training(profile, num_devices)
    if profile.source != "shipped":
        raise PlannerError(
            f"execution {execution.name} is priced with rates of published runs and profile "
            f"{profile.name} is measured; use a shipped profile, or ours-eager"
        )
    return _executed(profile, execution, ceil(num_devices / profile.cluster.devices_per_node))


@lru_cache(maxsize=64)
def _executed(profile: Profile, execution: Execution, num_nodes: int) -> Profile:
    rates = load_rates(profile).slowed(profile.factors_of(execution.name))
    return ExecutedProfile(profile, rates, num_nodes=num_nodes, execution=execution)
