"""The block problem solved exactly by eliminating one variable after another.

The objective is a sum of tables over few variables each (`tables`). Eliminating variable x replaces
the tables that mention x, sum T_i(x, ...), by the one table min over x of sum T_i(x, ...) over the
neighbours of x; when no variable is left the number that remains is the optimum, and the choices
are read back in reverse. This is the contraction of nodes, edges and branches of a graph: a chain
link has one or two neighbours, a residual branch three, and each step is exact.

Cost: the sum of table sizes, values ** (neighbours + 1), in the order of `ordering`; a transformer
layer (60 ops, up to 10 strategies) needs tables of at most three or four variables. `TooWide` is
raised before a table would outgrow `max_cells`, and the caller turns to the linear program
(`block_lp`) or to a relaxation (`decompose`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from search.op_layout.block_tables.block_problem import BlockProblem, Choice, Table
from search.op_layout.elimination.ordering import Elimination, elimination_order
from search.op_layout.elimination.tables import problem_tables

_MOST_CELLS = 4_000_000
"""32 MiB of costs: about where a linear program is faster."""

_CELLS_AT_ONCE = 32_768
"""Sums up to this size (256 KiB) stay in a processor's cache."""

_EVERY_VALUE = slice(None)


class TooWide(Exception):
    """A table would need more cells than allowed; elimination is the wrong method here."""


def solve_by_elimination(
    problem: BlockProblem, *, bytes_price: float = 0.0, max_cells: int = _MOST_CELLS
) -> Choice:
    """Return the exact optimum of seconds + bytes_price * bytes; raise TooWide if unsuited."""
    tables, sizes = problem_tables(problem, bytes_price)
    values, cost = minimise_tables(tables, sizes, max_cells)
    return Choice(values=values[: len(problem.variables)], cost=cost)


def minimise_tables(
    tables: Sequence[Table], sizes: Sequence[int], max_cells: int
) -> tuple[tuple[int, ...], float]:
    """Return the choice of all variables that minimises the sum of the tables, and that sum."""
    order = elimination_order(tuple([scope for scope, _ in tables]), tuple(sizes), max_cells)
    if order is None:
        raise TooWide(f"a table of more than {max_cells} cells is needed")
    return follow_order(order, tables, len(sizes))


def follow_order(
    order: Sequence[Elimination], tables: Sequence[Table], num_variables: int
) -> tuple[tuple[int, ...], float]:
    """Return `minimise_tables`' answer by these steps."""
    values = [table for _, table in tables]
    constant = sum([float(table) for scope, table in tables if not scope])
    for step in order:
        values.append(_least(step, values))
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
