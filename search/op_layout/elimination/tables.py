"""The objective of a block problem as a sum of tables over few variables each.

There is a table for each variable (its own cost) and one for each edge (redistribution, over the
producer and the uses of a tensor). A tensor of many uses would link them all in one table. It is
written with variables of its own instead: for each placement q that uses require, whether it is
paid for. Each use then shares a table with these alone (requiring q without paying for it costs
infinity), and so does the producer (what q costs from what it made).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from search.op_layout.block_tables.block_problem import BlockProblem, ReshardEdge, Table

FEW_CELLS = 100_000
"""Tables up to this size are not worth a second look for a better order."""

MOST_DIMS = 60
"""Dims that an array of numpy's may have, and some to spare."""


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
