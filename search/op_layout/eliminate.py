"""The block problem solved exactly by eliminating one variable after another.

The objective is a sum of tables over few variables each: one for each variable (its own cost) and
one for each edge (redistribution, over the producer and the uses of a tensor). A tensor of many
uses would link them all in one table. It is written with variables of its own instead: for each
placement q that uses require, whether it is paid for. Each use then shares a table with these alone
(requiring q without paying for it costs infinity), and so does the producer (what q costs from what
it made).

Eliminating variable x replaces the tables that mention x, sum T_i(x, ...), by the one table min
over x of sum T_i(x, ...) over the neighbours of x; when no variable is left the number that remains
is the optimum, and the choices are read back in reverse. A chain link has one or two neighbours, a
residual branch three, and each step is exact.

Cost: the sum of table sizes, values ** (neighbours + 1), in the order of `ordering`; a transformer
layer (60 ops, up to 10 strategies) needs tables of at most three or four variables. `TooWide` is
raised before a table would outgrow `max_cells`, and the caller turns to the integer program
(`search.ilp.blocks`) or to a relaxation (`decompose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from search.op_layout.block_problem import BlockProblem, Choice, ReshardEdge
from search.op_layout.ordering import FEW_CELLS, MOST_DIMS, Table, elimination_order, follow_order

_MOST_CELLS = 4_000_000
"""32 MiB of costs: about where an integer program is faster."""


class TooWide(Exception):
    """A table would need more cells than allowed; elimination is the wrong method here."""


def solve_by_elimination(
    problem: BlockProblem, *, bytes_price: float = 0.0, max_cells: int = _MOST_CELLS
) -> Choice:
    """Return the exact optimum of seconds + bytes_price * bytes; raise TooWide if unsuited."""
    tables, sizes = problem_tables(problem, bytes_price)
    values, cost = minimise_tables(tables, sizes, max_cells)
    # Behind the problem's own variables are those that say what is paid for.
    return Choice(values=values[: len(problem.variables)], cost=cost)


def minimise_tables(
    tables: Sequence[Table], sizes: Sequence[int], max_cells: int
) -> tuple[tuple[int, ...], float]:
    """Return the choice of all variables that minimises the sum of the tables, and that sum."""
    order = elimination_order(tuple([scope for scope, _ in tables]), tuple(sizes), max_cells)
    if order is None:
        raise TooWide(f"a table of more than {max_cells} cells is needed")
    return follow_order(order, tables, len(sizes))


def problem_tables(
    problem: BlockProblem, bytes_price: float, *, most_edge_cells: int = FEW_CELLS
) -> tuple[list[Table], list[int]]:
    """Return the objective as tables, and how many values each variable has.

    The problem's variables come first, then those that say what is paid for, of edges whose one
    table would have more than `most_edge_cells`.
    """
    sizes = [len(v.values) for v in problem.variables]
    tables: list[Table] = [
        ((index,), variable.seconds + bytes_price * variable.num_bytes)
        for index, variable in enumerate(problem.variables)
    ]
    num_own = len(sizes)
    for edge in problem.edges:
        found = edge.tables.get(most_edge_cells)
        if found is None:
            found = edge.tables[most_edge_cells] = edge_tables(
                edge, sizes[:num_own], most_edge_cells
            )
        # An edge numbers its variables from `num_own` on: they move behind those of earlier edges.
        added = {v for scope, _ in found for v in scope if v >= num_own}
        shift = len(sizes) - num_own
        if added and shift:
            found = tuple(
                (tuple(v + shift * (v >= num_own) for v in scope), table) for scope, table in found
            )
        tables += found
        sizes += [2] * len(added)
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
    if len(variables) > MOST_DIMS or prod(sizes[v] for v in variables) > most_cells:
        return _paid_tables(edge, sizes)
    shape = tuple(sizes[v] for v in variables)

    def spread(variable: int | None, values: NDArray) -> NDArray:
        """Lay a variable's values along its own dim of the table."""
        dims = [1] * len(shape)
        if variable in variables:
            dims[variables.index(variable)] = len(values)
        return values.reshape(dims)

    source = np.array(edge.source)
    # A chain link, which most edges are: producer and one use.
    if len(edge.uses) == 1 and len(variables) == 2:
        user, requirements = edge.uses[0]
        # (producer, user), turned where the user has the lower number.
        total = edge.seconds[source[:, None], np.array(requirements)]
        return ((variables, total if variables == (edge.producer, user) else total.T),)
    total = np.zeros(shape)
    required_of = [spread(variable, np.array(requirements)) for variable, requirements in edge.uses]
    for column in sorted(
        {requirement for _, requirements in edge.uses for requirement in requirements}
    ):
        # Paid once however many uses require it.
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
        # (producer, paid) What is not paid for costs nothing; else the price from what was made.
        free = np.zeros(len(price))
        if edge.producer is None or len(price) == 1:
            tables.append(((paid,), np.array([0.0, price[0]])))
        else:
            tables.append(((edge.producer, paid), np.stack([free, price], axis=1)))
        for user, requirements in uses:
            required = requirements == column
            if not required.any():
                continue
            # (user, paid) A use may only require what is paid for.
            unpaid = np.where(required, inf, 0.0)
            if user is None or len(requirements) == 1:
                tables.append(((paid,), np.array([unpaid[0], 0.0])))
            else:
                tables.append(
                    ((user, paid), np.stack([unpaid, np.zeros(len(requirements))], axis=1))
                )
        paid += 1
    return tuple(tables)
