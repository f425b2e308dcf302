"""Which nodes a plan's ranks lie on, in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.language.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Nodes in a row with as many ranks each."""

    group: str
    """The group of devices they are of; empty in a cluster of equal nodes."""
    ranks: int
    """Ranks of each node."""
    nodes: int
    """How many nodes."""


def node_runs(plan: Plan) -> tuple[NodeRun, ...]:
    """Return the nodes of a plan on groups of devices; none where its cluster lists no nodes.

    Raises PlanError where the ranks of a node do not follow each other.
    """
    sizes = {name: (size, size * nodes) for name, size, nodes in plan.cluster.nodes}
    if not sizes:
        return ()
    takers = [name for groups in plan.device_groups for name in groups.split("+")]
    runs: list[tuple[str, int]] = []  # a group, and the ranks in a row that lie on it
    for name in takers:
        ranks = sizes[name][1] // takers.count(name)
        before = runs.pop()[1] if runs and runs[-1][0] == name else 0
        runs.append((name, before + ranks))
    if parted := [name for name, ranks in runs if ranks % sizes[name][0]]:
        raise PlanError(
            f"stages of the plan take parts of nodes of {parted[0]!r} in turn with other "
            "groups, and a launcher starts ranks that follow each other on a node; search with "
            "another `pp`"
        )
    return tuple(
        NodeRun(group=name, ranks=sizes[name][0], nodes=ranks // sizes[name][0])
        for name, ranks in runs
    )


def described(runs: Sequence[NodeRun]) -> str:
    """Say which nodes there are: ``2 nodes of old with 4 ranks each, then 1 of new with 8``."""
    first, *others = runs
    told = f"{first.nodes} node{'s' * (first.nodes > 1)} of {first.group} with {first.ranks} ranks"
    return ", then ".join(
        [
            told + " each" * (first.nodes > 1),
            *(f"{r.nodes} of {r.group} with {r.ranks}" for r in others),
        ]
    )


def ranks_of_nodes(plan: Plan, num_nodes: int) -> tuple[int, ...]:
    """Return the ranks that each of so many launchers starts, in the order of ranks.

    They are the plan's nodes where it lists as many; else each starts equally many, on a part of a
    node if need be. Raises PlanError where that can't be.
    """
    runs = node_runs(plan) if num_nodes > 1 else ()
    sizes = tuple(run.ranks for run in runs for _ in range(run.nodes))
    if len(sizes) == num_nodes:
        return sizes
    if num_nodes < 1 or plan.world_size % num_nodes:
        hint = f"; the plan is for {described(runs)}: give {len(sizes)}" if runs else ""
        raise PlanError(
            f"num_nodes={num_nodes} does not divide the plan's {plan.world_size} ranks; each node "
            f"runs equally many{hint}"
        )
    each = plan.world_size // num_nodes
    if any(size % each for size in sizes):
        raise PlanError(
            f"num_nodes={num_nodes} would put {each} ranks on each node, and the plan is for "
            f"{described(runs)}; give {len(sizes)}"
        )
    return (each,) * num_nodes
