"""Where the ranks of each mesh axis lie on the nodes of a cluster.

The order of the axes is that of ranks (`planner.language.layout.axes.AXES`): the last axis has
neighbours, and ranks along an axis are as far apart as all axes inside it have ranks together (its
stride). Pipeline ranks follow each other outside all axes. For example

    dp 2, cp 2, tp 2 on nodes of 4:   tp stride 1, cp stride 2, dp stride 4, pp stride 8
    node 0: ranks 0 1 2 3             so tp and cp groups stay in a node, dp groups leave it

The domains of a cluster's tiers (`planner.cluster.Tier`) hold neighbours, as nodes do: with rails
of 16 devices the dp group above stays in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from planner.cluster import ClusterSpec
from planner.language.layout.axes import (
    Degrees,
    axis_names,
    batch_axes,
    lowered_axes,
    members,
    rest_axis,
)
from profiles import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A mesh axis that blocks are lowered on: how many ranks, and where they lie."""

    size: int
    group: Group


Run = tuple[int, int]
"""So many ranks, and how far they are apart."""


def axis_group(cluster: ClusterSpec, *, size: int, stride: int) -> Group:
    """Return the group of `size` ranks that are `stride` apart."""
    return _group_of(cluster, ((size, stride),))


def _group_of(cluster: ClusterSpec, runs: Sequence[Run]) -> Group:
    """Return the group of all ranks that runs reach together."""
    size = prod(size for size, _ in runs)

    def together(devices: int) -> int:
        """Return how many of the ranks lie among so many neighbouring devices."""
        # Where a stage's ranks on these devices end, those on another group of devices begin.
        return _together(runs, min(devices, cluster.stage_ranks or devices))

    per_node = together(cluster.devices_per_node)
    # Inside nodes there is something to tell only of ranks that stay in one, all that are here.
    stay = per_node == (together(cluster.stage_ranks) if cluster.stage_ranks else size)
    domains = tuple(
        -(-size // together(tier.devices))
        if stay or tier.devices >= cluster.devices_per_node
        else 1
        for tier in cluster.tiers
    )
    return Group(
        ranks_per_node=per_node,
        num_nodes=-(-size // per_node),
        domains=domains if max(domains, default=1) > 1 else (),
    )


def _together(runs: Sequence[Run], devices: int) -> int:
    """Return how many ranks of all runs lie among so many neighbouring devices."""
    # Ranks `stride` apart: devices // stride of them lie among that many neighbours.
    return prod(max(1, min(size, devices // stride)) for size, stride in runs)


def pair_group(cluster: ClusterSpec, *, apart: int) -> Group:
    """Return the group of two ranks that are so many ranks apart, whatever lies between them."""
    crosses = cluster.spans_nodes(2, stride=apart)
    domains = tuple(
        2 if apart >= tier.devices and crosses == (tier.devices >= cluster.devices_per_node) else 1
        for tier in cluster.tiers
    )
    return Group(
        ranks_per_node=1 if crosses else 2,
        num_nodes=2 if crosses else 1,
        domains=domains if max(domains, default=1) > 1 else (),
    )


def neighbours(group: Group) -> Group:
    """Return two ranks of a group that follow each other on a ring, over the farthest link there
    is: all wait for the slowest.
    """
    across = group.num_nodes > 1
    return Group(
        ranks_per_node=1 if across else 2,
        num_nodes=2 if across else 1,
        domains=tuple(min(2, count) for count in group.domains),
    )


def way_out(cluster: ClusterSpec) -> Group:
    """Return the pair of a rank of the cluster and one outside it, over its outermost tier."""
    return Group(ranks_per_node=1, num_nodes=2, domains=(*[1] * (len(cluster.tiers) - 1), 2))


def group_along(cluster: ClusterSpec, degrees: Degrees, name: str) -> Group:
    """Return the group of the ranks along an axis, or along "batch" or "data" together.

    Axes next to each other make one run of equal strides. Where another axis lies between, the
    ranks of a node are a part of every run.
    """
    wanted = members(name)
    runs: list[Run] = []  # innermost first
    stride, is_next = 1, False
    for axis in reversed(axis_names()):
        size = degrees[axis]
        if size == 1:
            continue
        if axis in wanted and is_next:
            runs[-1] = (runs[-1][0] * size, runs[-1][1])
        elif axis in wanted:
            runs.append((size, stride))
        is_next = axis in wanted
        stride *= size
    return _group_of(cluster, runs)


def lowered_groups(cluster: ClusterSpec, degrees: Degrees) -> dict[str, Axis]:
    """Return the axes that a block's program may be lowered on, by name."""
    own = {
        axis.name: Axis(size=degrees[axis.name], group=group_along(cluster, degrees, axis.name))
        for axis in lowered_axes()
    }
    # The experts' mesh deals a stage's ranks in order: to etp, then to ep.
    experts = axis_group(cluster, size=degrees["ep"], stride=degrees["etp"])
    return own | {"ep": Axis(size=degrees["ep"], group=experts)}


def replica_mesh(degrees: Degrees) -> Degrees:
    """Return the mesh of one replica: sizes on the axes that cut the batch are 1."""
    return degrees.with_sizes(**{axis.name: 1 for axis in batch_axes()})


def data_group(cluster: ClusterSpec, replica: Degrees, *, replicas: int) -> Group:
    """Return the group of so many ranks with the same parameters: those of a replica's mesh, and
    of as many replicas as it takes, which are neighbours.
    """
    # A replica's own cp ranks share parameters already; the rest are neighbouring replicas (dp).
    times = replicas // replica.along("data")
    return group_along(cluster, replica.with_sizes(**{rest_axis().name: times}), "data")


def copies_group(cluster: ClusterSpec, replica: Degrees, *, shards: int, copies: int) -> Group:
    """Return the group of the ranks with the same shards, each in `shards` neighbouring replicas of
    its own; `replica` is the mesh of a replica, whose axes "data" are among the shards.
    """
    stride = replica.num_ranks * shards // replica.along("data")
    return axis_group(cluster, size=copies, stride=stride)


def pipeline_group(cluster: ClusterSpec, degrees: Degrees, *, pp: int) -> Group:
    """Return the pair of ranks of neighbouring stages; the slowest pair stands for all.

    With several stages in a node most transfers stay inside, but a pipeline moves at the pace of
    its slowest link, so a transfer is between nodes as soon as the pipeline spans nodes.
    """
    # If any two neighbouring stages lie on different nodes, the first and the last do.
    return pair_group(cluster, apart=(pp - 1) * ranks_of_stage(cluster, degrees.num_ranks))


def ranks_of_stage(cluster: ClusterSpec, num_ranks: int) -> int:
    """Return how many of a stage's ranks lie on these devices: so far apart are those of one place
    in neighbouring stages.
    """
    return cluster.stage_ranks or num_ranks
