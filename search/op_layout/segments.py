"""Segments that lead nowhere: strategies that the best choice in a block can do without.

Where a tensor t may lie as Shard(d, k), k segments, let f_t drop the segments: Shard(d). Let f of
a strategy be f_t on each of its tensors. If every op has f(s) for each strategy s of its own,
then f of a whole choice is a choice that costs no more: a rank has the same shapes, so ops take as
long and hold as much, and a redistribution between f(p) and f(q) is that between p and q, or none
where they have become equal. So strategies with segments can be left out.

Few models are so plain (a fused projection is cut in its parts, a flattened batch in its samples),
so f_t keeps the segments of some placements of some tensors: it starts by keeping none, and where
an op lacks f(s), what s has in segments is kept, until every op has all it needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.language.layout.placement import Own, Placement, Shard
from search.op_layout.reshard_edges import Strategies, shared_strategies

Kept = frozenset[tuple[int, Placement]]
"""Positions among an op's inputs and outputs, with a placement there whose segments are kept."""


def kept_segments(ops: Sequence[tuple[Sequence[Hashable], Strategies]]) -> tuple[Kept, ...]:
    """Return what each op keeps in segments; ops are given by their tensors and their strategies.

    Tensors are those of inputs and outputs in order; equal ones lie alike.
    """
    kept: dict[Hashable, set[Placement]] = {}

    def kept_by(tensors: Sequence[Hashable]) -> Kept:
        found = [(at, tensor) for at, tensor in enumerate(tensors) if tensor in kept]
        return frozenset([(at, place) for at, tensor in found for place in kept[tensor]])

    users: dict[Hashable, set[int]] = {}
    for number, (tensors, _) in enumerate(ops):
        for tensor in tensors:
            users.setdefault(tensor, set()).add(number)
    # A fixed point: segments kept at a tensor may leave its other ops without f(s), so these are
    # looked at again. It ends, as placements are only ever added.
    waiting = dict.fromkeys(
        [number for number, (_, strategies) in enumerate(ops) if any(strategies.segmented)]
    )
    while waiting:
        number = next(iter(waiting))
        del waiting[number]
        tensors, strategies = ops[number]
        for position, place in _lacking(strategies, kept_by(tensors)):
            mine = kept.setdefault(tensors[position], set())
            if place not in mine:
                mine.add(place)
                waiting.update(dict.fromkeys(users[tensors[position]]))
    return tuple([kept_by(tensors) for tensors, _ in ops])


@lru_cache(maxsize=16384)
def _lacking(strategies: Strategies, kept: Kept) -> Kept:
    """Return the segments of strategies that an op lacks without the segments not kept."""
    every = {(*strategy.inputs, *strategy.outputs) for strategy in strategies.values}
    lacking: set[tuple[int, Placement]] = set()
    for strategy, cut in zip(strategies.values, strategies.segmented, strict=True):
        if not cut:
            continue
        # f(s): without segments, but for those that tensors keep by now.
        plain: list[Placement] = [*strategy.inputs, *strategy.outputs]
        for at, place in cut:
            if (at, place) not in kept and isinstance(place, Shard | Own):
                plain[at] = replace(place, segments=1)
        if tuple(plain) not in every:
            # The op has no f(s), so all of s in segments is kept, though a part of it might do.
            lacking.update(cut)
    return frozenset(lacking - kept)


@lru_cache(maxsize=16384)
def without(strategies: Strategies, kept: Kept) -> tuple[Strategies, NDArray[np.intp]]:
    """Return the strategies without segments, but for those kept, and which of all these are."""
    left = [
        index for index, cut in enumerate(strategies.segmented) if all(at in kept for at in cut)
    ]
    values = tuple([strategies.values[index] for index in left])
    return shared_strategies(values), np.array(left, dtype=np.intp)
