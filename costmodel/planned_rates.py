"""What single exchanges of given shapes take by a profile, for a check of the machine itself."""

from __future__ import annotations

from collections.abc import Iterable

from profiles import Group, Profile


def planned_exchange_seconds(
    profile: Profile, shapes: Iterable[tuple[str, int, int]], sizes: Iterable[int]
) -> dict[tuple[str, int, int], dict[int, float]]:
    """Return seconds by shape and by bytes of the whole tensor.

    A shape is a kind of collective, the ranks on each node, and the number of nodes.
    """
    sizes = tuple(sizes)
    return {
        (kind, per_node, nodes): {
            num_bytes: profile.collective_seconds(
                kind, num_bytes, Group(ranks_per_node=per_node, num_nodes=nodes)
            ).seconds
            for num_bytes in sizes
        }
        for kind, per_node, nodes in shapes
    }
