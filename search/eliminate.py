"""The block problem solved exactly by eliminating one variable after another.

Write the objective as a sum of tables over few variables each: one per variable (its own
cost) and one per link (redistribution, over the maker and the uses of a tensor). Eliminating
variable x replaces the tables that mention x, sum T_i(x, ...), by the one table
min over x of sum T_i(x, ...) over the neighbours of x, remembering the best x; when no
variable is left the number that remains is the optimum, and the choices are read back in
reverse. This is the contraction of nodes, edges and branches of a graph: a chain link has one
or two neighbours, a residual branch three, and each step is exact.

Order: the variable whose new table is smallest first. Cost: the sum of table sizes,
values ** (neighbours + 1); a transformer layer (60 ops, up to 10 strategies) needs tables of
at most three or four variables. `TooWide` is raised before a table would outgrow `max_cells`,
and the caller turns to the integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from search.block_problem import BlockProblem, Link

Table = tuple[tuple[int, ...], NDArray[np.float64]]
"""Variables (ascending) and the cost of each combination of their values."""


class TooWide(Exception):
    """A table would need more cells than allowed; elimination is the wrong method here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An optimal choice: value index of each variable, and the objective."""

    values: tuple[int, ...]
    cost: float


def solve_by_elimination(
    problem: BlockProblem, *, bytes_price: float = 0.0, max_cells: int = 4_000_000
) -> Choice:
    """Return the exact optimum of seconds + bytes_price * bytes; raise TooWide if unsuited."""
    sizes = [len(v.values) for v in problem.variables]
    tables: list[Table] = [
        ((index,), v.seconds + bytes_price * v.num_bytes)
        for index, v in enumerate(problem.variables)
    ]
    tables += [link_table(link, sizes, max_cells) for link in problem.links]
    return minimise_tables(tables, sizes, max_cells)


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

    total = np.zeros(shape)
    source = np.array(link.source)
    for column in range(link.seconds.shape[1]):
        asked = np.zeros(shape, dtype=bool)
        for variable, asks in link.uses:
            asked = asked | spread(variable, np.array(asks) == column)
        if not asked.any():
            continue
        paid = spread(link.producer, link.seconds[source, column])
        total = total + np.where(asked, paid, 0.0)
    return variables, total


def minimise_tables(tables: Sequence[Table], sizes: Sequence[int], max_cells: int) -> Choice:
    """Return the choice of all variables that minimises the sum of the tables."""
    remaining = set(range(len(sizes)))
    of_variable: dict[int, list[Table]] = {v: [] for v in remaining}
    constant = 0.0
    for table in tables:
        if not table[0]:
            constant += float(table[1])
        for variable in table[0]:
            of_variable[variable].append(table)
    neighbours = {
        v: {u for variables, _ in of_variable[v] for u in variables} - {v} for v in remaining
    }
    steps: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    while remaining:
        variable = min(
            remaining, key=lambda v: (prod(sizes[u] for u in neighbours[v]) * sizes[v], v)
        )
        scope = tuple(sorted(neighbours[variable] | {variable}))
        shape = tuple(sizes[u] for u in scope)
        if prod(shape) > max_cells:
            raise TooWide(f"a table of {prod(shape)} cells is needed")
        total = np.zeros(shape)
        for variables, values in of_variable[variable]:
            dims = [sizes[u] if u in variables else 1 for u in scope]
            total = total + values.reshape(dims)
        axis = scope.index(variable)
        reduced: Table = (scope[:axis] + scope[axis + 1 :], total.min(axis=axis))
        steps.append((variable, reduced[0], total.argmin(axis=axis)))
        gone = {id(table) for table in of_variable[variable]}
        for other in reduced[0]:
            of_variable[other] = [t for t in of_variable[other] if id(t) not in gone]
            of_variable[other].append(reduced)
            neighbours[other] |= set(reduced[0]) - {other}
            neighbours[other].discard(variable)
        if not reduced[0]:
            constant += float(reduced[1])
        remaining.remove(variable)
    chosen = [0] * len(sizes)
    for variable, scope, best in reversed(steps):
        chosen[variable] = int(best[tuple(chosen[u] for u in scope)])
    return Choice(values=tuple(chosen), cost=constant)
