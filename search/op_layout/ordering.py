"""In which order variables are eliminated, and what each step sums, then chooses.

The variable whose new table is smallest goes first; where that makes large tables, the one that
joins the fewest others, if its tables are fewer cells in all (min-fill; Kjaerulff, Triangulation of
Graphs, 1990). An order depends on which variables tables have and on how many values these have,
not on costs, so it is found once for equal structures.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import inf, log2, prod

import numpy as np
from numpy.typing import NDArray

from planner.deadline import check_time

Table = tuple[tuple[int, ...], NDArray[np.float64]]
"""Variables (ascending) and the cost of each combination of their values."""

FEW_CELLS = 100_000
"""Tables up to this size are not worth a second look for a better order."""

MOST_DIMS = 60
"""Dims that an array of numpy's may have, and some to spare."""

_CELLS_AT_ONCE = 32_768
"""Sums up to this size (256 KiB) stay in a processor's cache."""

_EVERY_VALUE = slice(None)

_MANY_LEFT = 200
"""Where one order is stuck with so many variables left, another will be, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """One step: a variable leaves, and one table takes the place of all that mention it."""

    variable: int
    """The variable that leaves."""
    scope: tuple[int, ...]
    """Variables of the new table, which is numbered on from those there are."""
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    """The tables summed: index, and the shape that lines it up with the others."""
    scopes: tuple[tuple[int, ...], ...]
    """Variables of each of them."""
    shape: tuple[int, ...]
    """Shape of their sum."""
    axis: int
    """The variable's place in it."""
    num_cells: int
    """Cells of it."""


@lru_cache(maxsize=256)
def elimination_order(
    scopes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], max_cells: int
) -> tuple[Elimination, ...] | None:
    """Return the steps of the better order, the same for equal structures.

    None where both need a table of more than `max_cells` cells.
    """
    found = []
    for by_fill in (False, True):
        ordering = Ordering(scopes, sizes, max_cells, by_fill=by_fill)
        if ordering.run():
            found.append(tuple(ordering.steps))
            if max((step.num_cells for step in ordering.steps), default=0) <= FEW_CELLS:
                break
        elif len(ordering.remaining) > _MANY_LEFT:
            break
    return min(found, key=lambda order: sum(step.num_cells for step in order), default=None)


class Ordering:
    """Variables being eliminated one after another; `steps` are those made so far."""

    def __init__(
        self,
        scopes: Sequence[tuple[int, ...]],
        sizes: Sequence[int],
        max_cells: float,
        *,
        by_fill: bool = False,
    ) -> None:
        self.steps: list[Elimination] = []
        self.scopes = list(scopes)
        self._num_given = len(scopes)
        self.sizes = list(sizes)
        # Of each variable that is left: the tables that
        # mention it, and the variables it shares one with.
        self.of_variable: dict[int, list[int]] = {v: [] for v in range(len(sizes))}
        for index, scope in enumerate(scopes):
            for variable in scope:
                self.of_variable[variable].append(index)
        self.of_variable = {v: mine for v, mine in self.of_variable.items() if mine}
        self.neighbours = {
            v: {u for t in self.of_variable[v] for u in scopes[t]} - {v} for v in self.of_variable
        }
        self.max_cells = max_cells
        self._by_fill = by_fill
        # Latest rating of each variable that is left, and a
        # heap of ratings, outdated ones among them.
        self._score: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        for variable in self.of_variable:
            self.rate(variable)

    def rate(self, variable: int) -> None:
        """Note how soon a variable is to be eliminated, as it stands now; never if too wide."""
        cells = self._cells(variable)
        score = self._fill(variable) if self._by_fill and cells <= self.max_cells else cells
        self._score[variable] = score
        # A variable that is too wide stays out of the heap until a step near it narrows it.
        if cells <= self.max_cells:
            heapq.heappush(self._heap, (score, variable))

    def _cells(self, v: int) -> float:
        """The size of the sum that eliminating v needs."""
        if len(self.neighbours[v]) >= MOST_DIMS:
            # More dims than an array can have.
            return inf
        return prod(self.sizes[u] for u in self.neighbours[v]) * self.sizes[v]

    def _fill(self, v: int) -> float:
        """The size of the edges that eliminating v makes between its neighbours."""
        # Weighted min-fill: an edge between variables of a and b values weighs log a * log b.
        return sum(
            log2(self.sizes[a]) * log2(self.sizes[b])
            for a, b in combinations(sorted(self.neighbours[v]), 2)
            if b not in self.neighbours[a]
        )

    def run(self) -> bool:
        """Eliminate while no sum is too wide; return whether no variable is left."""
        while self._heap:
            check_time()
            score, variable = heapq.heappop(self._heap)
            # An older rating of a variable stays in the heap: only its latest counts.
            if self._score.get(variable) == score:
                self.eliminate(variable)
        return not self._score

    @property
    def remaining(self) -> list[int]:
        """Variables not eliminated yet."""
        return sorted(self._score)

    def take_out(self, variable: int) -> list[int]:
        """Leave a variable out of all tables; return those, which are as they are."""
        tables, others = self.of_variable.pop(variable), self.neighbours.pop(variable)
        for index in tables:
            self.scopes[index] = tuple(u for u in self.scopes[index] if u != variable)
        del self._score[variable]
        for other in others:
            self.neighbours[other].discard(variable)
            self.rate(other)
        return tables

    def split(self, variable: int) -> dict[int, list[int]]:
        """Give each table of a variable a copy of it, but for tables of its own costs alone.

        Returns which of the given tables each copy, numbered on, is in.
        """
        members = {t: self._given(t, variable) for t in self.of_variable[variable]}
        others = set(self.neighbours[variable])
        tables = self.take_out(variable)
        # What others' elimination has added to its own costs goes with the first copy.
        alone = [t for t in tables if not self.scopes[t]]
        copies: dict[int, list[int]] = {}
        for table in tables:
            if table in alone:
                continue
            copy = len(self.sizes)
            self.sizes.append(self.sizes[variable])
            mine = [table] if copies else [table, *(t for t in alone if t >= self._num_given)]
            copies[copy] = [given for t in mine for given in members[t]]
            for t in mine:
                self.scopes[t] = (*self.scopes[t], copy)
            self.of_variable[copy] = mine
            self.neighbours[copy] = {u for t in mine for u in self.scopes[t]} - {copy}
            for other in self.neighbours[copy]:
                self.neighbours[other].add(copy)
            self.rate(copy)
        for other in others:
            self.rate(other)
        return copies

    def _given(self, table: int, variable: int) -> list[int]:
        """Return the given tables with a variable that a table was made of."""
        found, waiting = [], [table]
        while waiting:
            table = waiting.pop()
            if table < self._num_given:
                found.append(table)
                continue
            # A table that a step made stands for the tables that the step summed.
            step = self.steps[table - self._num_given]
            waiting += [
                index
                for (index, _), scope in zip(step.tables, step.scopes, strict=True)
                if variable in scope
            ]
        return found

    def eliminate(self, variable: int) -> None:
        """Make the next step: a table takes the place of all that mention the variable."""
        wide = tuple(sorted(self.neighbours[variable] | {variable}))
        axis = wide.index(variable)
        scope = wide[:axis] + wide[axis + 1 :]
        mine = self.of_variable.pop(variable)
        shape = tuple([self.sizes[u] for u in wide])
        self.steps.append(
            Elimination(
                variable=variable,
                scope=scope,
                tables=tuple(
                    (index, tuple(self.sizes[u] if u in self.scopes[index] else 1 for u in wide))
                    for index in mine
                ),
                scopes=tuple(self.scopes[index] for index in mine),
                shape=shape,
                axis=axis,
                num_cells=prod(shape),
            )
        )
        # Tables are numbered as they are made: the given ones, then one for each step.
        made, gone = len(self.scopes), set(mine)
        self.scopes.append(scope)
        for other in scope:
            kept = [t for t in self.of_variable[other] if t not in gone]
            self.of_variable[other] = [*kept, made]
            # The new table links all that the variable was linked to.
            self.neighbours[other] |= set(scope) - {other}
            self.neighbours[other].discard(variable)
        del self.neighbours[variable], self._score[variable]
        # What joins two of the scope is all that changed.
        near = set(scope).union(*(self.neighbours[u] for u in scope)) if self._by_fill else scope
        for other in near:
            self.rate(other)


def follow_order(
    order: Sequence[Elimination], tables: Sequence[Table], num_variables: int
) -> tuple[tuple[int, ...], float]:
    """Return the choice of all variables that minimises the sum of the tables, and that sum."""
    values = [table for _, table in tables]
    constant = sum([float(table) for scope, table in tables if not scope])
    for step in order:
        check_time()
        values.append(_least(step, values))
        # Nothing depends on it any more: a part of the optimum that is settled.
        if not step.scope:
            constant += float(values[-1])
    # Each variable's sum again, now with all that left after it chosen: in the step's own order, so
    # that the least of it is, bit for bit, what the step found.
    chosen: list = [0] * num_variables
    for step in reversed(order):
        chosen[step.variable] = _EVERY_VALUE
        total: NDArray[np.float64] | float = 0.0
        for (index, _), scope in zip(step.tables, step.scopes, strict=True):
            total = total + values[index][tuple(map(chosen.__getitem__, scope))]
        chosen[step.variable] = int(np.asarray(total).argmin())
    return tuple(chosen), constant


def _least(step: Elimination, values: Sequence[NDArray]) -> NDArray[np.float64]:
    """Return the sum of a step's tables under the best value of its variable."""
    lined_up = [values[index].reshape(dims) for index, dims in step.tables]
    if step.num_cells <= _CELLS_AT_ONCE:
        total = lined_up[0]
        for table in lined_up[1:]:
            total = total + table
        return np.asarray(np.minimum.reduce(total, axis=step.axis))
    # One value after another: what is added and compared stays in the processor's cache.
    least = np.full((*step.shape[: step.axis], *step.shape[step.axis + 1 :]), np.inf)
    for value in range(step.shape[step.axis]):
        terms = [np.take(t, value if t.shape[step.axis] > 1 else 0, step.axis) for t in lined_up]
        np.minimum(least, sum(terms[1:], start=terms[0]), out=least)
    return least
