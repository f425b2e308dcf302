"""Whether the hosts have room for what a plan puts there."""

from __future__ import annotations

from dataclasses import replace

from planner.plan import Plan
from planner.units import format_bytes
from profiles import Profile
from search.request import SearchResult


def host_bytes(plan: Plan, profile: Profile) -> int:
    """Return what the devices of one node put on its host at most, by the plan's estimate."""
    most = max(rank.get("host_bytes", 0) for rank in plan.estimate["memory"])
    return int(most) * min(profile.cluster.devices_per_node, plan.world_size)


def host_holds(plan: Plan, profile: Profile) -> bool:
    """Whether a node's host has the memory for what a plan puts there."""
    needed = host_bytes(plan, profile)
    return (
        not needed or profile.cluster.device_type == "cpu" or (needed <= profile.host.memory_bytes)
    )


def too_large_for_host(result: SearchResult, profile: Profile) -> SearchResult:
    """Return a result as refused, because the host can't hold its plan's part."""
    assert result.plan is not None
    needed = format_bytes(host_bytes(result.plan, profile))
    reason = (
        f"the plan that fits puts {needed} on each node's host, which has "
        f"{format_bytes(int(profile.host.memory_bytes))}; use more devices, or `zero` 1"
    )
    return replace(result, plan=None, reasons=(reason,), leanest=result.plan, runners_up=())
