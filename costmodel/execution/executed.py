"""A profile as a runtime uses it: every time from the rates that training runs told.

The rates of a device (`costmodel.table.kernels.DeviceRates`) say what a kernel of a size takes in
the middle of a step; the `Execution` says which kernels there are and what they run beside.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2

from costmodel.execution.execution import Execution
from costmodel.in_training import TrainingProfile, in_training
from costmodel.table.kernels import DeviceRates
from costmodel.table.rates import load_rates
from planner.errors import PlannerError
from profiles import Group, Lookup, Profile
from profiles.records import StepWork

OPTIMIZER_KERNELS = 20
"""Launches of an optimizer's step over flat buffers."""

FP32_BYTES = 4
"""A profile is asked for the bytes of fp32 tensors; passes are counted by elements."""


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

    @property
    def multiplies_narrow(self) -> bool:
        """Whether layers multiply in 8 bits or fewer, which the device can."""
        is_narrow = self.product_dtype.startswith(("float8", "float4"))
        return is_narrow and self.product_dtype in self.rates.peak_flop_per_s

    def with_rates(self, rates: DeviceRates) -> ExecutedProfile:
        """Return the same machine with other rates."""
        return ExecutedProfile(
            self.alone,
            rates,
            num_nodes=self.num_nodes,
            execution=self.execution,
            product_dtype=self.product_dtype,
        )

    def _reached_part(self, group: Group) -> float:
        """Return what part of its links' rate a group reaches."""
        if group.num_nodes == 1:
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
        return Lookup(
            seconds=seconds, source=f"{work} of {self.execution.name}", relative_error=0.2
        )

    def skew_seconds(self, size: int) -> float:
        """Return what ranks wait for the last of them at a collective that nothing overlaps."""
        return self.rates.skew_s * log2(size)


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
    return ExecutedProfile(profile, load_rates(profile), num_nodes=num_nodes, execution=execution)
