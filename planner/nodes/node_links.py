"""Pairs of nodes: in which order their links are measured, and which nodes slow links are of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

SLOW = 2.0
"""A link that takes so many times what others like it take is slow: on busy machines times vary by
half, and a link that runs at less than its rate mostly runs at a half, a quarter or a tenth."""


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each of so many nodes meets one other, and each pair meets once.

    There are `count - 1` rounds, or `count` of an odd number. The circle method: the first stays,
    the others move up a place each round.
    """
    places: list[int | None] = [*range(count), *[None] * (count % 2)]
    rounds = []
    for _ in range(len(places) - 1 if count > 1 else 0):
        half = places[: len(places) // 2]
        pairs = zip(half, reversed(places), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


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
