"""What single exchanges among ranks of a plan take by a profile, for a check of the machine itself.

Where ranks lie follows from the plan and the cluster: they fill groups of devices, nodes and the
domains of tiers in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from costmodel.topology import way_out
from planner.cluster import ClusterSpec
from planner.errors import PlanError
from planner.language.plan import Plan
from profiles import Group, Profile

PlannedSeconds = Callable[[str, Sequence[int], int], float]
"""Seconds of a kind of exchange among ranks, on so many bytes of the whole tensor."""

BETWEEN_NODES = Group(ranks_per_node=1, num_nodes=2)


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a rank lies: its group of devices ("" where all are equal), and its number there."""

    group: str
    number: int


def planned_seconds(plan: Plan, machine: Profile) -> PlannedSeconds:
    """Return what tells the seconds of exchanges of a plan's ranks on a machine.

    Raises PlanError where the machine has not the groups of devices that the plan lies on.
    """
    homes = _homes(plan, machine)
    profiles = {group.name: group.profile for group in machine.groups} or {"": machine}

    @cache
    def seconds_in(name: str, kind: str, group: Group, num_bytes: int) -> float:
        return profiles[name].collective_seconds(kind, num_bytes, group).seconds

    def seconds(kind: str, ranks: Sequence[int], num_bytes: int) -> float:
        places = [homes[rank] for rank in ranks]
        names = dict.fromkeys(place.group for place in places)
        if len(names) == 1:
            (name,) = names
            numbers = [place.number for place in places]
            group = group_of_numbers(profiles[name].cluster, numbers)
            return seconds_in(name, kind, group, num_bytes)
        # Each group's links as far as they go, then the one between: the slowest counts.
        found = []
        for name in names:
            own = [place.number for place in places if place.group == name]
            inside = group_of_numbers(profiles[name].cluster, own)
            across = way_out(profiles[name].cluster)
            # As if all groups were like this one: as many nodes in each, over the outermost tier.
            group = Group(
                ranks_per_node=inside.ranks_per_node,
                num_nodes=inside.num_nodes * len(names),
                domains=(*across.domains[:-1], len(names)),
            )
            found.append(seconds_in(name, kind, group, num_bytes))
        return max(found)

    return seconds


def between_nodes_seconds(machine: Profile, num_bytes: int) -> float:
    """Return a message between two nodes, of the group whose links are slowest."""
    profiles = [group.profile for group in machine.groups] or [machine]
    return max(
        profile.collective_seconds("send_recv", num_bytes, BETWEEN_NODES).seconds
        for profile in profiles
    )


def group_of_numbers(cluster: ClusterSpec, numbers: Sequence[int]) -> Group:
    """Return the group of devices with these numbers in a cluster."""
    num_nodes = len({number // cluster.devices_per_node for number in numbers})
    domains = tuple(
        len({number // tier.devices for number in numbers})
        if num_nodes == 1 or tier.devices >= cluster.devices_per_node
        else 1
        for tier in cluster.tiers
    )
    return Group(
        ranks_per_node=-(-len(numbers) // num_nodes),
        num_nodes=num_nodes,
        domains=domains if max(domains, default=1) > 1 else (),
    )


def _homes(plan: Plan, machine: Profile) -> list[_Home]:
    """Return where each rank lies."""
    ranks = plan.degrees.num_ranks
    if not machine.groups:
        return [_Home("", rank) for rank in range(plan.world_size)]
    sizes = {group.name: group.num_devices for group in machine.groups}
    joined = [names.split("+") for names in plan.device_groups]
    takers = Counter(name for names in joined for name in names)
    if strange := [name or "no named group" for name in takers if name not in sizes]:
        raise PlanError(
            f"the plan lies on devices of {strange[0]} and the cluster {machine.name!r} has "
            f"{', '.join(sizes)}; give the `cluster` file that it was searched for"
        )
    homes: list[_Home] = []
    filled: Counter[str] = Counter()
    for names in joined:
        for name in names:
            count = ranks if len(names) == 1 else sizes[name] // takers[name]
            homes += [_Home(name, filled[name] + at) for at in range(count)]
            filled[name] += count
    if len(homes) != plan.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} ranks and its groups of the cluster {machine.name!r} "
            f"{len(homes)} devices; give the `cluster` file that it was searched for"
        )
    return homes
