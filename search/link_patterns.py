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

from planner.placement import OpSharding, Placement, Replicate
from planner.redistribute import collectives
from search.block_problem import Ask, at_rest

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkPattern:
    """A `Link` but for its seconds: `sources` and `asks` differ from each other.

    source[value of the maker] is a row; columns[use][value of it] a column; kinds[index[row,
    column]] are the collectives between them.
    """

    sources: tuple[Placement, ...]
    asks: tuple[Ask, ...]
    source: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    kinds: tuple[Kinds, ...]
    index: NDArray[np.intp]


@lru_cache(maxsize=16384)
def link_pattern(source: Yields, uses: tuple[Asks, ...]) -> LinkPattern:
    """Return the pattern of a tensor that is made and used so."""
    row = {place: number for number, place in enumerate(dict.fromkeys(source.places))}
    every = dict.fromkeys(ask for use in uses for ask in use.asked)
    column = {ask: number for number, ask in enumerate(every)}
    number: dict[Kinds, int] = {}
    index = [
        [number.setdefault(collectives(place, *ask), len(number)) for ask in column]
        for place in row
    ]
    return LinkPattern(
        sources=tuple(row),
        asks=tuple(column),
        source=tuple(row[place] for place in source.places),
        columns=tuple(tuple(column[ask] for ask in use.asked) for use in uses),
        kinds=tuple(number),
        index=np.array(index),
    )


@lru_cache(maxsize=4096)
def kinds_from_rest(use: Asks) -> Sequence[Kinds]:
    """Return the collectives between a parameter with one use, as it lies, and that use."""
    return tuple(collectives(at_rest(place), place, partial) for place, partial in use.asked)
