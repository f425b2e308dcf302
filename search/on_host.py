"""What a search puts on the host: tables, the optimizer, activations, and the room there."""

from __future__ import annotations

from dataclasses import replace

from costmodel.memory.bound import NOTHING, OnHost
from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.graph.tables import tables_of, without_mixed_classes
from planner.language.plan import Plan
from planner.language.stacks import Expressed
from planner.units import format_bytes
from profiles import Profile
from search.request import Offload, SearchResult


def offload_fallbacks(
    offload: Offload, profile: Profile, graph: ModelGraph, expressed: Expressed | None = None
) -> tuple[tuple[OnHost, ...], ...]:
    """Return what to put on the host: fallbacks in turn until a plan fits, the fastest of each.

    A plan with nothing on the host comes first and, where there is one, alone: offload adds copies
    to it, and a device's time should not depend on its host's. Room on the device can be worth more
    than the copies all the same (Llama-3-70B on 64 H100, global batch 512: 78.4 s a step with both
    on the host, 79.1 s with neither), which only `offload` both finds. A CPU's memory is
    the host's already, so there nothing is moved unless the request says so.

    Tables with sparse gradients go first, where the model has any: rows that a step touches are
    few. The optimizer goes with them, as it would step on both sides. Raises LayoutError where the
    request names tables and there are none. What a stack does not have on the host (`expressed`) is
    not tried.
    """

    def may_be(part: str) -> bool:
        return expressed is None or not expressed.why_not_on_host(part)

    has_tables = may_be("tables") and bool(tables_to_host(graph))
    if offload == "tables" and not has_tables:
        raise LayoutError(
            "`offload` tables was given, and the model has no table that lookups with sparse=True "
            "alone read; use nn.Embedding(..., sparse=True) and an optimizer such as SparseAdam"
        )
    plain, tables = NOTHING, OnHost(tables=True)
    optimizer = OnHost(optimizer=True, tables=has_tables)
    activations = OnHost(activations=True, tables=has_tables)
    both = OnHost(optimizer=True, activations=True, tables=has_tables)
    if offload == "auto":
        if profile.cluster.device_type == "cpu":
            return ((plain,),)
        first = ((plain,), (tables,)) if has_tables else ((plain,),)
        alone = {"optimizer": optimizer, "activations": activations}
        either = tuple(on_host for part, on_host in alone.items() if may_be(part))
        return (*first, *[either] * bool(either), *[(both,)] * (len(either) == len(alone)))
    if offload == "activations":  # and nothing else
        return ((OnHost(activations=True),),)
    asked = {"none": plain, "optimizer": optimizer, "both": both, "tables": tables}
    return ((asked[offload],),)


def tables_to_host(graph: ModelGraph) -> tuple[str, ...]:
    """Return the tables that can be on the host, by the model's names: those whose gradients are
    sparse. Others would be stepped on there row by row, however few were looked up.
    """
    sparse = {table.name for table in tables_of(graph) if table.is_sparse}
    together = without_mixed_classes(graph, sparse)
    return tuple(graph.tensor[name].fqn for name in sorted(together)) if together == sparse else ()


def host_bytes(plan: Plan, profile: Profile) -> int:
    """Return what the devices of one node put on its host at most, by the plan's estimate."""
    # The ranks of a node share its host; each is counted as the fullest.
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
