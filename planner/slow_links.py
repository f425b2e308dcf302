"""Which nodes slow links are of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def slow_nodes(pairs: Iterable[Sequence[str]], slow: Collection[Sequence[str]]) -> tuple[str, ...]:
    """Return the nodes whose links are all slow, while links between other nodes are not.

    `pairs` are all pairs of nodes that were measured, `slow` those of them that are slow. Where
    all are slow no node stands out.
    """
    are_slow = {tuple(sorted(pair)) for pair in slow}
    every = [tuple(sorted(pair)) for pair in pairs]
    if all(pair in are_slow for pair in every):
        return ()
    nodes = dict.fromkeys(node for pair in every for node in pair)
    return tuple(node for node in nodes if all(pair in are_slow for pair in every if node in pair))
