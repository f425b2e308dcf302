"""Where the ranks of each mesh axis lie: ranks are pp-major, so tp groups are neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster import ClusterSpec
from profiles import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A mesh axis that blocks are split over: how many ranks, and where they lie."""

    size: int
    group: Group


def axis_group(cluster: ClusterSpec, *, size: int, stride: int) -> Group:
    """Return the group of `size` ranks that are `stride` apart.

    rank = ((pp_rank*dp + dp_rank)*cp + cp_rank)*tp + tp_rank, so strides are: tp 1, cp tp,
    dp cp*tp, pp dp*cp*tp.
    """
    per_node = max(1, min(size, cluster.devices_per_node // stride))
    return Group(ranks_per_node=per_node, num_nodes=-(-size // per_node))


def split_axes(cluster: ClusterSpec, *, tp: int, cp: int = 1) -> dict[str, Axis]:
    """Return the axes a block's program may be lowered on, by name."""
    return {
        "tp": Axis(size=tp, group=axis_group(cluster, size=tp, stride=1)),
        "cp": Axis(size=cp, group=axis_group(cluster, size=cp, stride=tp)),
    }


def tp_group(cluster: ClusterSpec, *, tp: int) -> Group:
    """Return the tensor-parallel group."""
    return axis_group(cluster, size=tp, stride=1)


def dp_group(cluster: ClusterSpec, *, dp: int, cp: int, tp: int) -> Group:
    """Return the group gradients are summed over: dp and cp together."""
    return axis_group(cluster, size=dp * cp, stride=tp)


def hop_group(cluster: ClusterSpec, *, dp: int, cp: int, tp: int, pp: int) -> Group:
    """Return the pair of ranks of neighbouring stages; the slowest pair stands for all.

    With several stages in a node most hops stay inside, but a pipeline moves at the pace of
    its slowest link, so a hop is between nodes as soon as the pipeline spans nodes.
    """
    crosses = cluster.spans_nodes(pp, stride=dp * cp * tp)
    return Group(ranks_per_node=1, num_nodes=2) if crosses else Group(ranks_per_node=2, num_nodes=1)
