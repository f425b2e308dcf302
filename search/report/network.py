"""The network of a plan: its links in tiers, and over which of them each mesh axis exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from costmodel.topology import group_along, pipeline_group
from planner.cluster import ClusterSpec, Link
from planner.language.plan import Plan
from profiles import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A level of the network, the innermost first."""

    name: str
    """The link."""
    reaches: int
    """Neighbouring devices that this level joins; all of the plan on the last one."""
    bytes_per_s: float
    """What one device has of it in each direction; infinite where the profile has no cost."""
    latency_s: float
    """Of one message."""
    axes: tuple[str, ...]
    """Mesh axes of the plan whose groups have this as their outermost link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkView:
    """Devices in nodes, and the links that a plan uses."""

    name: str
    """The cluster."""
    device: str
    """A device by name."""
    num_devices: int
    """Devices of the plan that lie here."""
    devices_per_node: int
    """Of a whole node."""
    links: tuple[LinkView, ...]
    """Levels, the innermost first."""


def find_network(plan: Plan, cluster: ClusterSpec) -> NetworkView:
    """Return the links of a cluster that a plan reaches, and which of its axes go over which."""
    world = plan.world_size
    # What leaves a domain of so many neighbours, and whether a group does.
    edges: list[tuple[int, Link, Callable[[Group], bool]]] = [
        (tier.devices, tier.link, partial(_leaves_domain, place=place))
        for place, tier in enumerate(cluster.tiers)
    ]
    if cluster.devices_per_node not in [devices for devices, _, _ in edges]:
        edges.append((cluster.devices_per_node, cluster.inter_node, _leaves_node))
    edges.sort(key=lambda edge: edge[0])
    groups = {
        axis: group_along(cluster, plan.degrees, axis)
        for axis, size in plan.degrees.items()
        if size > 1
    }
    if plan.pp > 1:
        groups["pp"] = pipeline_group(cluster, plan.degrees, pp=plan.pp)
    outermost = {
        # The outermost edge that a group crosses; 0: it stays in the innermost domain.
        axis: max((n for n, edge in enumerate(edges, 1) if edge[2](group)), default=0)
        for axis, group in groups.items()
    }
    links = [cluster.intra_node, *(link for _, link, _ in edges)]
    # A level is shown only where the plan is larger than the domains inside it.
    domains = [1, *(devices for devices, _, _ in edges), world]
    return NetworkView(
        name=cluster.name,
        device=cluster.device,
        num_devices=world,
        devices_per_node=cluster.devices_per_node,
        links=tuple(
            LinkView(
                name=link.name,
                reaches=min(domains[level + 1], world),
                bytes_per_s=1 / link.beta_s_per_byte if link.beta_s_per_byte else float("inf"),
                latency_s=link.alpha_s,
                axes=tuple(axis for axis, last in outermost.items() if last == level),
            )
            for level, link in enumerate(links)
            if domains[level] < world
        ),
    )


def _leaves_domain(group: Group, *, place: int) -> bool:
    return bool(group.domains) and group.domains[place] > 1


def _leaves_node(group: Group) -> bool:
    return group.num_nodes > 1
