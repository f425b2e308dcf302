"""What meets at a tensor: its produced placements, and those that its uses require.

None of it depends on sizes, so microbatch sizes, boundaries and blocks alike share it: equal
columns are one object, and the pattern of a edge is found once for the columns that meet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.language.layout.placement import (
    OpSharding,
    Own,
    Partial,
    Placement,
    Replicate,
    Shard,
    cut_dim,
    has_way,
)
from planner.language.layout.redistribute import collectives

Dims = tuple[int | None, ...]
"""The dim along which each tensor of an op is cut; None: whole."""

Requirement = tuple[Placement, bool]
"""What a use requires of a tensor: a placement, and whether it returns a partial gradient."""

Kinds = tuple[str | None, str | None]
"""The collectives of a move, forward and backward."""

NO_WAY: Kinds = ("no way", None)
"""A move that does not exist (`has_way`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Produced:
    """The placement of a tensor for each value of its producer; equal ones are one object."""

    places: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Requirements:
    """What each value of a use requires of a tensor; equal ones are one object."""

    required: tuple[Requirement, ...]


@lru_cache(maxsize=4096)
def produced(*places: Placement) -> Produced:
    """Return the shared object for these placements."""
    return Produced(places)


@lru_cache(maxsize=4096)
def requirements(*required: Requirement) -> Requirements:
    """Return the shared object for these requirements."""
    return Requirements(required)


@dataclass(frozen=True, slots=True, eq=False)
class Strategies:
    """The strategies that an op may take, and what they produce and require; equal ones are one
    object, and positions are those of inputs and outputs in order.
    """

    values: tuple[OpSharding, ...]
    dims: tuple[Dims, ...]
    """For each strategy the dim along which each tensor of the op is cut."""
    segmented: tuple[tuple[tuple[int, Placement], ...], ...]
    """For each strategy its placements in several segments, with their positions."""
    _produced: dict[int, Produced] = field(default_factory=dict)
    _requirements: dict[int, Requirements] = field(default_factory=dict)

    def produced(self, position: int) -> Produced:
        """Return the placements of the output at a position."""
        if position not in self._produced:
            self._produced[position] = produced(
                *(strategy.outputs[position] for strategy in self.values)
            )
        return self._produced[position]

    def requirements(self, position: int) -> Requirements:
        """Return what is required of the input at a position."""
        if position not in self._requirements:
            self._requirements[position] = requirements(
                *(
                    (strategy.inputs[position], gradient_partial(strategy, position))
                    for strategy in self.values
                )
            )
        return self._requirements[position]


@lru_cache(maxsize=4096)
def shared_strategies(values: tuple[OpSharding, ...]) -> Strategies:
    """Return the shared object for these strategies."""
    # (strategy, tensor) Inputs and outputs in order.
    every = [(*strategy.inputs, *strategy.outputs) for strategy in values]
    return Strategies(
        values=values,
        dims=tuple([tuple([cut_dim(place) for place in places]) for places in every]),
        segmented=tuple([tuple(filter(_has_segments, enumerate(places))) for places in every]),
    )


def _has_segments(placed: tuple[int, Placement]) -> bool:
    _, place = placed
    return isinstance(place, Shard | Own) and place.segments > 1


def gradient_partial(sharding: OpSharding, position: int) -> bool:
    """Whether the op returns a partial gradient for its input at `position`.

    A replicated input of an op that works on shards meets only this rank's share of the
    outputs, so each rank holds a term of its gradient.
    """
    if not isinstance(sharding.inputs[position], Replicate):
        return False
    return any(not isinstance(p, Replicate) for p in sharding.outputs)


# Produced placements and requirements: one of each sort that `collectives` tells apart. Between two
# shards it matters whether they are the same, or at least of the same dim; so it does between two
# values of each rank's own, of which other ones have no way.
_SOURCES = (Replicate(), Partial(), Shard(0), Own(0))
_REQUIREMENTS = (
    (Replicate(), False),
    (Replicate(), True),
    (Partial(), False),
    (Shard(0), False),
    (Shard(0, 2), False),
    (Shard(1), False),
    (Own(0), False),
    (Own(0, 2), False),
    (Own(1), False),
)
# The number of the first requirement of each sort of placement; behind the first shard come those
# of the same dim and of another one.
_FIRST = np.array([0, 2, 3, 6])


def _kinds(source: Placement, required: Requirement) -> Kinds:
    return collectives(source, *required) if has_way(source, required[0]) else NO_WAY


_BETWEEN = [[_kinds(place, requirement) for requirement in _REQUIREMENTS] for place in _SOURCES]

MOVES: tuple[Kinds, ...] = tuple(dict.fromkeys(kinds for row in _BETWEEN for kinds in row))
"""All there is between two placements."""

_MOVE = np.array([[MOVES.index(kinds) for kinds in row] for row in _BETWEEN])


def moves_between(
    sources: Sequence[Placement], required: Sequence[Requirement]
) -> NDArray[np.intp]:
    """Return which of `MOVES` leads from each source to each requirement."""
    # (source, requirement, (sort, dim, segments)), each with an axis of length 1.
    rows = np.array([_sort_of(place) for place in sources])[:, None, :]
    columns = np.array([_sort_of(place) for place, _ in required])[None, :, :]
    same_dim, same = (rows[..., at] == columns[..., at] for at in (1, 2))
    # The number in `_REQUIREMENTS`: of shards by how much of the source they have in common, of
    # whole tensors by whether their gradient is partial.
    requirement = _FIRST[columns[..., 0]] + np.where(
        columns[..., 0] >= 2,
        np.where(same_dim, np.where(same, 0, 1), 2),
        (columns[..., 0] == 0) & np.array([partial for _, partial in required]),
    )
    return _MOVE[rows[..., 0], requirement]


def _sort_of(place: Placement) -> tuple[int, int, int]:
    """Return a placement's number in `_SOURCES`, and its dim and segments."""
    if isinstance(place, Shard):
        return 2, place.dim, place.segments
    if isinstance(place, Own):
        return 3, -1 if place.dim is None else place.dim, place.segments
    return int(isinstance(place, Partial)), -1, 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgePattern:
    """A `ReshardEdge` but for its seconds, with a row for each placement made and a column for each
    requirement: source[value of the producer] is a row, columns[use][value of it] a column, and
    moves[row, column] the one of `MOVES` between them.
    """

    source: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    moves: NDArray[np.intp]


@lru_cache(maxsize=16384)
def edge_pattern(source: Produced, uses: tuple[Requirements, ...]) -> EdgePattern:
    """Return the pattern of a tensor that is made and used so."""
    # Values that make or require the same share a row or a column: tables of seconds stay small.
    row = {place: number for number, place in enumerate(dict.fromkeys(source.places))}
    every = dict.fromkeys(requirement for use in uses for requirement in use.required)
    column = {requirement: number for number, requirement in enumerate(every)}
    return EdgePattern(
        source=tuple(row[place] for place in source.places),
        columns=tuple(tuple(column[requirement] for requirement in use.required) for use in uses),
        moves=moves_between(tuple(row), tuple(column)),
    )
