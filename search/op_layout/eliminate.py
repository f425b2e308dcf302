"""The block problem solved exactly by eliminating one variable after another.

Write the objective as a sum of tables over few variables each: one per variable (its own
cost) and one per edge (redistribution, over the producer and the uses of a tensor). Eliminating
variable x replaces the tables that mention x, sum T_i(x, ...), by the one table
min over x of sum T_i(x, ...) over the neighbours of x, remembering the best x; when no
variable is left the number that remains is the optimum, and the choices are read back in
reverse. This is the contraction of nodes, edges and branches of a graph: a chain link has one
or two neighbours, a residual branch three, and each step is exact.

A tensor of many uses would link them all in one table. It is written with variables of its own
instead: for each placement q that uses require, whether it is paid for. Each use then shares a
table with these alone (requiring q without paying for it costs infinity), and so does the producer
(what q costs from what it made).

Order: the variable whose new table is smallest first; where that makes large tables, the one
that joins the fewest others, if its tables are fewer cells in all (min-fill; Kjaerulff,
Triangulation of Graphs, 1990). Cost: the sum of table sizes,
values ** (neighbours + 1); a transformer layer (60 ops, up to 10 strategies) needs tables of
at most three or four variables. `TooWide` is raised before a table would outgrow `max_cells`,
and the caller turns to the linear program (`block_lp`) or to a relaxation (`decompose`).
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

from search.op_layout.block_problem import BlockProblem, ReshardEdge, SharedTables, Table

# 32 MiB of costs: about where a linear program is faster.
_MOST_CELLS = 4_000_000
# Tables up to this size are not worth a second look for a better order.
_FEW_CELLS = 100_000
# Where one order is stuck with so many variables left, another will be, too.
_MANY_LEFT = 200
# Dims that an array of numpy's may have, and some to spare.
_MOST_DIMS = 60

# Sums up to this size (256 KiB) stay in a processor's cache.
_CELLS_AT_ONCE = 32_768


class TooWide(Exception):
    """A table would need more cells than allowed; elimination is the wrong method here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice: value index of each variable, the objective, and what part of it is unproved.

    A `gap` of 0 is an optimum; of 0.1, at most a tenth of `cost` more than one.
    """

    values: tuple[int, ...]
    cost: float
    gap: float = 0.0


def solve_by_elimination(
    problem: BlockProblem, *, bytes_price: float = 0.0, max_cells: int = _MOST_CELLS
) -> Choice:
    """Return the exact optimum of seconds + bytes_price * bytes; raise TooWide if unsuited."""
    tables, sizes = problem_tables(problem, bytes_price)
    values, cost = minimise_tables(tables, sizes, max_cells, problem.tables)
    return Choice(values=values[: len(problem.variables)], cost=cost)


def problem_tables(
    problem: BlockProblem, bytes_price: float, *, most_edge_cells: int = _FEW_CELLS
) -> tuple[list[Table], list[int]]:
    """Return the objective as tables, and how many values each variable has.

    The problem's variables come first, then those that say what is paid for, of edges whose one
    table would have more than `most_edge_cells`.
    """
    sizes = [len(v.values) for v in problem.variables]
    shared = problem.tables
    tables: list[Table] = []
    for index, variable in enumerate(problem.variables):
        key = variable, bytes_price
        if key not in shared.costs:
            shared.costs[key] = variable.seconds + bytes_price * variable.num_bytes
        tables.append(((index,), shared.costs[key]))
    num_own = len(sizes)
    for edge in problem.edges:
        kept = edge, most_edge_cells
        if kept not in shared.edges:
            shared.edges[kept] = edge_tables(edge, sizes[:num_own], most_edge_cells)
        added = len({v for scope, _ in shared.edges[kept] for v in scope if v >= num_own})
        shift = len(sizes) - num_own
        tables += [
            (tuple(v + shift * (v >= num_own) for v in scope), table)
            for scope, table in shared.edges[kept]
        ]
        sizes += [2] * added
    return tables, sizes


def edge_tables(edge: ReshardEdge, sizes: Sequence[int], most_cells: int) -> tuple[Table, ...]:
    """Return an edge's cost over its variables: each distinct requirement paid once.

    One table where that is small. Else variables, 0 or 1, are numbered on from the given ones,
    one for each requirement that may cost something: whether it is paid for.
    """
    members = {u for u, _ in edge.uses if u is not None}
    if edge.producer is not None:
        members.add(edge.producer)
    # What has one value only is given, as are the requirements of other blocks.
    variables = tuple(sorted(v for v in members if sizes[v] > 1))
    if len(variables) > _MOST_DIMS or prod(sizes[v] for v in variables) > most_cells:
        return _paid_tables(edge, sizes)
    shape = tuple(sizes[v] for v in variables)

    def spread(variable: int | None, values: NDArray) -> NDArray:
        """Lay a variable's values along its own dim of the table."""
        dims = [1] * len(shape)
        if variable in variables:
            dims[variables.index(variable)] = len(values)
        return values.reshape(dims)

    source = np.array(edge.source)
    if len(edge.uses) == 1 and len(variables) == 2:
        user, requirements = edge.uses[0]
        total = edge.seconds[source[:, None], np.array(requirements)]
        return ((variables, total if variables == (edge.producer, user) else total.T),)
    total = np.zeros(shape)
    required_of = [spread(variable, np.array(requirements)) for variable, requirements in edge.uses]
    for column in sorted(
        {requirement for _, requirements in edge.uses for requirement in requirements}
    ):
        required = required_of[0] == column
        for others in required_of[1:]:
            required = required | (others == column)
        paid = spread(edge.producer, edge.seconds[source, column])
        total = total + np.where(required, paid, 0.0)
    return ((variables, total),)


def _paid_tables(edge: ReshardEdge, sizes: Sequence[int]) -> tuple[Table, ...]:
    """Return an edge's tables with a variable for each requirement: whether it is paid for."""
    tables: list[Table] = []
    source = np.array(edge.source)
    uses = [(user, np.array(requirements)) for user, requirements in dict.fromkeys(edge.uses)]
    paid = len(sizes)
    for column in sorted(
        {requirement for _, requirements in edge.uses for requirement in requirements}
    ):
        price = edge.seconds[source, column]
        if not price.any():
            continue
        free = np.zeros(len(price))
        if edge.producer is None or len(price) == 1:
            tables.append(((paid,), np.array([0.0, price[0]])))
        else:
            tables.append(((edge.producer, paid), np.stack([free, price], axis=1)))
        for user, requirements in uses:
            required = requirements == column
            if not required.any():
                continue
            unpaid = np.where(required, inf, 0.0)
            if user is None or len(requirements) == 1:
                tables.append(((paid,), np.array([unpaid[0], 0.0])))
            else:
                tables.append(
                    ((user, paid), np.stack([unpaid, np.zeros(len(requirements))], axis=1))
                )
        paid += 1
    return tuple(tables)


def minimise_tables(
    tables: Sequence[Table], sizes: Sequence[int], max_cells: int, shared: SharedTables
) -> tuple[tuple[int, ...], float]:
    """Return the choice of all variables that minimises the sum of the tables, and that sum.

    Steps that a problem with tables in common has made already are taken from `shared`.
    """
    order = elimination_order(tuple(scope for scope, _ in tables), tuple(sizes), max_cells)
    if order is None:
        raise TooWide(f"a table of more than {max_cells} cells is needed")
    return follow_order(order, tables, len(sizes), shared)


def follow_order(
    order: Sequence[Elimination],
    tables: Sequence[Table],
    num_variables: int,
    shared: SharedTables | None = None,
) -> tuple[tuple[int, ...], float]:
    """Return `minimise_tables`' answer by these steps."""
    values = [table for _, table in tables]
    constant = sum(float(table) for scope, table in tables if not scope)
    for step in order:
        made_of = tuple(values[index] for index, _ in step.tables)
        key = step.axis, *((id(values[index]), dims) for index, dims in step.tables)
        known = shared.sums.get(key) if shared is not None else None
        least = known[0] if known is not None else _least(step, made_of)
        if shared is not None and step.num_cells <= _FEW_CELLS:
            shared.sums[key] = least, made_of
        values.append(least)
        if not step.scope:
            constant += float(values[-1])
    chosen = [0] * num_variables
    for step in reversed(order):
        chosen[step.variable] = int(_costs_given(step, values, chosen).argmin())
    return tuple(chosen), constant


def _least(step: Elimination, tables: Sequence[NDArray]) -> NDArray[np.float64]:
    """Return the sum of a step's tables under the best value of its variable."""
    lined_up = [table.reshape(dims) for (_, dims), table in zip(step.tables, tables, strict=True)]
    if step.num_cells <= _CELLS_AT_ONCE:
        return np.asarray(sum(lined_up[1:], start=lined_up[0]).min(axis=step.axis))
    # One value after another: what is added and compared stays in the processor's cache.
    least = np.full((*step.shape[: step.axis], *step.shape[step.axis + 1 :]), np.inf)
    for value in range(step.shape[step.axis]):
        terms = [np.take(t, value if t.shape[step.axis] > 1 else 0, step.axis) for t in lined_up]
        np.minimum(least, sum(terms[1:], start=terms[0]), out=least)
    return least


def _costs_given(
    step: Elimination, values: Sequence[NDArray], chosen: Sequence[int]
) -> NDArray[np.float64]:
    """Return what each value of a step's variable costs with all that left after it chosen.

    Summed again in the step's own order: the least of them is, bit for bit, what it found.
    """
    total: NDArray[np.float64] | float = 0.0
    for index, scope in zip((index for index, _ in step.tables), step.scopes, strict=True):
        at = tuple(slice(None) if u == step.variable else chosen[u] for u in scope)
        total = total + values[index][at]
    return np.asarray(total)


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

    @property
    def num_cells(self) -> int:
        """Cells of the sum before the variable leaves."""
        return prod(self.shape)


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
            if max((step.num_cells for step in ordering.steps), default=0) <= _FEW_CELLS:
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
        self._score: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        for variable in self.of_variable:
            self.rate(variable)

    def rate(self, variable: int) -> None:
        """Note how soon a variable is to be eliminated, as it stands now; never if too wide."""
        cells = self._cells(variable)
        score = self._fill(variable) if self._by_fill and cells <= self.max_cells else cells
        self._score[variable] = score
        if cells <= self.max_cells:
            heapq.heappush(self._heap, (score, variable))

    def _cells(self, v: int) -> float:
        """The size of the sum that eliminating v needs."""
        if len(self.neighbours[v]) >= _MOST_DIMS:
            return inf
        return prod(self.sizes[u] for u in self.neighbours[v]) * self.sizes[v]

    def _fill(self, v: int) -> float:
        """The size of the edges that eliminating v makes between its neighbours."""
        return sum(
            log2(self.sizes[a]) * log2(self.sizes[b])
            for a, b in combinations(sorted(self.neighbours[v]), 2)
            if b not in self.neighbours[a]
        )

    def run(self) -> bool:
        """Eliminate while no sum is too wide; return whether no variable is left."""
        while self._heap:
            score, variable = heapq.heappop(self._heap)
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
        self.steps.append(
            Elimination(
                variable=variable,
                scope=scope,
                tables=tuple(
                    (index, tuple(self.sizes[u] if u in self.scopes[index] else 1 for u in wide))
                    for index in mine
                ),
                scopes=tuple(self.scopes[index] for index in mine),
                shape=tuple(self.sizes[u] for u in wide),
                axis=axis,
            )
        )
        made, gone = len(self.scopes), set(mine)
        self.scopes.append(scope)
        for other in scope:
            kept = [t for t in self.of_variable[other] if t not in gone]
            self.of_variable[other] = [*kept, made]
            self.neighbours[other] |= set(scope) - {other}
            self.neighbours[other].discard(variable)
        del self.neighbours[variable], self._score[variable]
        # What joins two of the scope is all that changed.
        near = set(scope).union(*(self.neighbours[u] for u in scope)) if self._by_fill else scope
        for other in near:
            self.rate(other)
