"""What meets at a tensor: placements that its maker's values yield, and those that its uses' ask.

None of it depends on sizes, so microbatch sizes, boundaries and blocks alike share it: equal
columns are one object, and the pattern of a link is found once for the columns that meet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.layout.placement import OpSharding, Partial, Placement, Replicate, Shard
from planner.layout.redistribute import collectives
from search.op_layout.block_problem import Ask, at_rest

Kinds = tuple[str | None, str | None]
"""The collectives of a move, forward and backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Yields:
    """The placement of a tensor for each value of its maker; equal ones are one object."""

    places: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Asks:
    """What each value of a use asks of a tensor; equal ones are one object."""

    asked: tuple[Ask, ...]


@lru_cache(maxsize=4096)
def yields(*places: Placement) -> Yields:
    """Return the one object for these placements."""
    return Yields(places)


@lru_cache(maxsize=4096)
def asks(*asked: Ask) -> Asks:
    """Return the one object for these asks."""
    return Asks(asked)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """The strategies that an op may take, and what they yield and ask; equal ones are one."""

    values: tuple[OpSharding, ...]
    _yields: dict[int, Yields] = field(default_factory=dict)
    _asks: dict[int, Asks] = field(default_factory=dict)

    def yields(self, position: int) -> Yields:
        """Return the placements of the output at a position."""
        if position not in self._yields:
            self._yields[position] = yields(*(one.outputs[position] for one in self.values))
        return self._yields[position]

    def asks(self, position: int) -> Asks:
        """Return what is asked of the input at a position."""
        if position not in self._asks:
            self._asks[position] = asks(
                *((one.inputs[position], gradient_partial(one, position)) for one in self.values)
            )
        return self._asks[position]


@lru_cache(maxsize=4096)
def offer(values: tuple[OpSharding, ...]) -> Offer:
    """Return the one object for these strategies."""
    return Offer(values)


def gradient_partial(sharding: OpSharding, position: int) -> bool:
    """Whether the op returns a partial gradient for its input at `position`.

    A replicated input of an op that works on shards meets only this rank's share of the
    outputs, so each rank holds a term of its gradient.
    """
    if not isinstance(sharding.inputs[position], Replicate):
        return False
    return any(not isinstance(p, Replicate) for p in sharding.outputs)


# Where placements lie, and what is asked: one of each sort that `collectives` tells apart. Between
# two shards it matters whether they are the same, or at least of the same dim.
_SOURCES = (Replicate(), Partial(), Shard(0))
_ASKS = (
    (Replicate(), False),
    (Replicate(), True),
    (Partial(), False),
    (Shard(0), False),
    (Shard(0, 2), False),
    (Shard(1), False),
)
_FIRST_SHARD = 3
_BETWEEN = [[collectives(place, *ask) for ask in _ASKS] for place in _SOURCES]

MOVES: tuple[Kinds, ...] = tuple(dict.fromkeys(kinds for row in _BETWEEN for kinds in row))
"""All there is between two placements."""

_MOVE = np.array([[MOVES.index(kinds) for kinds in row] for row in _BETWEEN])


def moves_between(sources: Sequence[Placement], asked: Sequence[Ask]) -> NDArray[np.intp]:
    """Return which of `MOVES` leads from each source to each ask."""
    rows = np.array([_sort_of(place) for place in sources])[:, None, :]
    columns = np.array([_sort_of(place) for place, _ in asked])[None, :, :]
    same_dim, same = (rows[..., at] == columns[..., at] for at in (1, 2))
    ask = np.where(
        columns[..., 0] == 2,
        _FIRST_SHARD + np.where(same_dim, np.where(same, 0, 1), 2),
        np.where(columns[..., 0] == 1, 2, np.array([partial for _, partial in asked])),
    )
    return _MOVE[rows[..., 0], ask]


def _sort_of(place: Placement) -> tuple[int, int, int]:
    """Return a placement's number in `_SOURCES`, and its dim and segments."""
    if isinstance(place, Shard):
        return 2, place.dim, place.segments
    return int(isinstance(place, Partial)), -1, 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkPattern:
    """A `Link` but for its seconds: `sources` and `asks` differ from each other.

    source[value of the maker] is a row; columns[use][value of it] a column; moves[row, column]
    is the one of `MOVES` between them.
    """

    sources: tuple[Placement, ...]
    asks: tuple[Ask, ...]
    source: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    moves: NDArray[np.intp]


@lru_cache(maxsize=16384)
def link_pattern(source: Yields, uses: tuple[Asks, ...]) -> LinkPattern:
    """Return the pattern of a tensor that is made and used so."""
    row = {place: number for number, place in enumerate(dict.fromkeys(source.places))}
    every = dict.fromkeys(ask for use in uses for ask in use.asked)
    column = {ask: number for number, ask in enumerate(every)}
    return LinkPattern(
        sources=tuple(row),
        asks=tuple(column),
        source=tuple(row[place] for place in source.places),
        columns=tuple(tuple(column[ask] for ask in use.asked) for use in uses),
        moves=moves_between(tuple(row), tuple(column)),
    )


@lru_cache(maxsize=4096)
def moves_from_rest(use: Asks) -> NDArray[np.intp]:
    """Return the moves between a parameter with one use, as it lies, and that use."""
    return np.array(
        [
            moves_between((at_rest(place),), ((place, partial),))[0, 0]
            for place, partial in use.asked
        ]
    )
