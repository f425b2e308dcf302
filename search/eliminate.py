"""The block problem solved exactly by eliminating one variable after another.

Write the objective as a sum of tables over few variables each: one per variable (its own
cost) and one per link (redistribution, over the maker and the uses of a tensor). Eliminating
variable x replaces the tables that mention x, sum T_i(x, ...), by the one table
min over x of sum T_i(x, ...) over the neighbours of x, remembering the best x; when no
variable is left the number that remains is the optimum, and the choices are read back in
reverse. This is the contraction of nodes, edges and branches of a graph: a chain link has one
or two neighbours, a residual branch three, and each step is exact.

Order: the variable whose new table is smallest first; where that makes large tables, the one
that joins the fewest others, if its tables are fewer cells in all (min-fill; Kjaerulff,
Triangulation of Graphs, 1990). Cost: the sum of table sizes,
values ** (neighbours + 1); a transformer layer (60 ops, up to 10 strategies) needs tables of
at most three or four variables. `TooWide` is raised before a table would outgrow `max_cells`,
and the caller turns to the linear program (`block_lp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

from search.block_problem import BlockProblem, Link, SharedTables, Table

# 32 MiB of costs: about where a linear program is faster.
_MOST_CELLS = 4_000_000
# Tables up to this size are not worth a second look for a better order.
_FEW_CELLS = 100_000


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
    sizes = [len(v.values) for v in problem.variables]
    shared = problem.tables
    tables: list[Table] = []
    for index, variable in enumerate(problem.variables):
        key = variable, bytes_price
        if key not in shared.costs:
            shared.costs[key] = variable.seconds + bytes_price * variable.num_bytes
        tables.append(((index,), shared.costs[key]))
    for link in problem.links:
        if link not in shared.links:
            shared.links[link] = link_table(link, sizes, max_cells)
        tables.append(shared.links[link])
    return minimise_tables(tables, sizes, max_cells, shared)


def link_table(link: Link, sizes: Sequence[int], max_cells: int) -> Table:
    """Return a link's cost over its variables: each distinct ask paid once."""
    members = {u for u, _ in link.uses if u is not None}
    if link.producer is not None:
        members.add(link.producer)
    variables = tuple(sorted(members))
    shape = tuple(sizes[v] for v in variables)
    if prod(shape) > max_cells:
        raise TooWide(f"tensor {link.tensor} links {len(variables)} choices")

    def spread(variable: int | None, values: NDArray) -> NDArray:
        """Lay a variable's values along its own dim of the table."""
        if variable is None:
            return values.reshape((1,) * len(shape))
        dims = [1] * len(shape)
        dims[variables.index(variable)] = len(values)
        return values.reshape(dims)

    source = np.array(link.source)
    if len(link.uses) == 1 and None not in (link.producer, link.uses[0][0]):
        user, asks = link.uses[0]
        total = link.seconds[source[:, None], np.array(asks)]
        return variables, total if variables == (link.producer, user) else total.T
    total = np.zeros(shape)
    asks_of = [spread(variable, np.array(asks)) for variable, asks in link.uses]
    for column in sorted({ask for _, asks in link.uses for ask in asks}):
        asked = asks_of[0] == column
        for one in asks_of[1:]:
            asked = asked | (one == column)
        paid = spread(link.producer, link.seconds[source, column])
        total = total + np.where(asked, paid, 0.0)
    return variables, total


def minimise_tables(
    tables: Sequence[Table], sizes: Sequence[int], max_cells: int, shared: SharedTables
) -> Choice:
    """Return the choice of all variables that minimises the sum of the tables.

    Steps that a problem with tables in common has made already are taken from `shared`.
    """
    values = [table for _, table in tables]
    constant = sum(float(table) for scope, table in tables if not scope)
    order = elimination_order(tuple(scope for scope, _ in tables), tuple(sizes))
    widest = max((step.num_cells for step in order), default=0)
    if widest > max_cells:
        raise TooWide(f"a table of {widest} cells is needed")
    for step in order:
        made_of = tuple(values[index] for index, _ in step.tables)
        key = step.axis, *((id(values[index]), dims) for index, dims in step.tables)
        least = shared.sums[key][0] if key in shared.sums else _least(step, made_of)
        if step.num_cells <= _FEW_CELLS:
            shared.sums[key] = least, made_of
        values.append(least)
        if not step.scope:
            constant += float(values[-1])
    chosen = [0] * len(sizes)
    for step in reversed(order):
        chosen[step.variable] = int(_costs_given(step, values, chosen).argmin())
    return Choice(values=tuple(chosen), cost=constant)


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
    """One step: `variable` leaves, and a table over `scope` takes the place of `tables`.

    `tables` are (index, shape that lines it up with the others), over `scopes`; `shape` is that
    of their sum and `axis` the variable's place in it. New tables are numbered on from the
    given ones.
    """

    variable: int
    scope: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    scopes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    axis: int

    @property
    def num_cells(self) -> int:
        """Cells of the sum before the variable leaves."""
        return prod(self.shape)


@lru_cache(maxsize=256)
def elimination_order(
    scopes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[Elimination, ...]:
    """Return the steps of the better order; the same for equal structures."""
    steps = _in_order(scopes, sizes, by_fill=False)
    if max((step.num_cells for step in steps), default=0) <= _FEW_CELLS:
        return steps
    return min(
        (steps, _in_order(scopes, sizes, by_fill=True)),
        key=lambda order: sum(step.num_cells for step in order),
    )


def _in_order(
    scopes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], *, by_fill: bool
) -> tuple[Elimination, ...]:
    remaining = set(range(len(sizes)))
    all_scopes = list(scopes)
    of_variable: dict[int, list[int]] = {v: [] for v in remaining}
    for index, scope in enumerate(scopes):
        for variable in scope:
            of_variable[variable].append(index)
    neighbours = {v: {u for t in of_variable[v] for u in scopes[t]} - {v} for v in remaining}
    weight = [log2(size) if size else 0.0 for size in sizes]

    def cells(v: int) -> float:
        """The size of the sum that eliminating v needs."""
        return prod(sizes[u] for u in neighbours[v]) * sizes[v]

    def fill(v: int) -> float:
        """The size of the links that eliminating v makes between its neighbours."""
        return sum(
            weight[a] * weight[b]
            for a, b in combinations(sorted(neighbours[v]), 2)
            if b not in neighbours[a]
        )

    first = fill if by_fill else cells
    score = {v: first(v) for v in remaining}
    steps = []
    while remaining:
        variable = min(remaining, key=lambda v: (score[v], v))
        wide = tuple(sorted(neighbours[variable] | {variable}))
        axis = wide.index(variable)
        scope = wide[:axis] + wide[axis + 1 :]
        tables = tuple(
            (index, tuple(sizes[u] if u in all_scopes[index] else 1 for u in wide))
            for index in of_variable[variable]
        )
        steps.append(
            Elimination(
                variable=variable,
                scope=scope,
                tables=tables,
                scopes=tuple(all_scopes[index] for index in of_variable[variable]),
                shape=tuple(sizes[u] for u in wide),
                axis=axis,
            )
        )
        made, gone = len(all_scopes), set(of_variable[variable])
        all_scopes.append(scope)
        for other in scope:
            of_variable[other] = [t for t in of_variable[other] if t not in gone] + [made]
            neighbours[other] |= set(scope) - {other}
            neighbours[other].discard(variable)
        remaining.remove(variable)
        # What joins two of the scope is all that changed.
        for other in set(scope).union(*(neighbours[u] for u in scope)) if by_fill else scope:
            score[other] = first(other)
    return tuple(steps)
