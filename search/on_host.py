"""What a search puts on the host: the optimizer, activations, both, nothing; and the room there."""

from __future__ import annotations

from dataclasses import replace

from costmodel.memory.bound import NOTHING, OnHost
from planner.plan import Plan
from planner.units import format_bytes
from profiles import Profile
from search.request import Offload, SearchResult


def offload_fallbacks(offload: Offload, profile: Profile) -> tuple[tuple[OnHost, ...], ...]:
    """Return what to put on the host: fallbacks in turn until a plan fits, the fastest of each.

    A plan with nothing on the host comes first and, where there is one, alone: offload adds copies
    to it, and a device's time should not depend on its host's. Room on the device can be worth more
    than the copies all the same (Llama-3-70B on 64 H100, global batch 512: 78.4 s a step with both
    on the host, 79.1 s with neither), which only `offload` both finds. A CPU's memory is
    the host's already, so there nothing is moved unless the request says so.
    """
    plain, optimizer, activations = NOTHING, OnHost(optimizer=True), OnHost(activations=True)
    both = OnHost(optimizer=True, activations=True)
    if offload == "auto":
        if profile.cluster.device_type == "cpu":
            return ((plain,),)
        return ((plain,), (optimizer, activations), (both,))
    asked = {"none": plain, "optimizer": optimizer, "activations": activations, "both": both}
    return ((asked[offload],),)


def host_bytes(plan: Plan, profile: Profile) -> int:
    """Return what the devices of one node put on its host at most, by the plan's estimate."""
    most = max(rank.get("host_bytes", 0) for rank in plan.estimate["memory"])
    return int(most) * min(profile.cluster.devices_per_node, plan.world_size)


def host_holds(plan: Plan, profile: Profile) -> bool:
    """Whether a node's host has the memory for what a plan puts there."""
    if profile.groups:
        return all(host_holds(plan, group.profile) for group in profile.groups)
    needed = host_bytes(plan, profile)
    return (
        not needed or profile.cluster.device_type == "cpu" or (needed <= profile.host.memory_bytes)
    )


def too_large_for_host(result: SearchResult, profile: Profile) -> SearchResult:
    """Return a result as infeasible, because the host can't hold its plan's part."""
    assert result.plan is not None
    needed = format_bytes(host_bytes(result.plan, profile))
    reason = (
        f"the plan that fits puts {needed} on each node's host, which has "
        f"{format_bytes(int(profile.host.memory_bytes))}; use more devices, or `zero` 1"
    )
    return replace(result, plan=None, reasons=(reason,), leanest=result.plan, runners_up=())
