"""A block problem solved by the first solver that suits it, the exact ones first."""

from __future__ import annotations

import numpy as np

from planner.errors import ProfileError
from search.op_layout.block_tables.block_problem import BlockProblem, Choice
from search.op_layout.elimination.eliminate import TooWide, solve_by_elimination

ELIMINATION = "variable elimination"
"""The solver that takes no time to speak of."""

_MOST_PAIRS = 25_000
"""How large a linear program is tried."""


def solve_block(
    problem: BlockProblem, bytes_price: float, *, time_limit_s: float = 5.0
) -> tuple[Choice, str]:
    """Return the optimum of a block problem, or the best found in time, and who found it.

    A problem too wide for elimination may take the limit, twice where a linear program is tried.
    Raises ProfileError where every choice takes infinitely long.
    """
    choice, solver = _solve(problem, bytes_price, time_limit_s)
    if choice is None or not np.isfinite(choice.cost):
        names = " and ".join(repr(program.name) for _, program in problem.programs)
        raise ProfileError(
            f"no placement of block class {names} on tp={problem.axis_size} takes a finite time "
            "under this profile; see what is wrong with `check_profile`"
        )
    return choice, solver


def _solve(
    problem: BlockProblem, bytes_price: float, time_limit_s: float
) -> tuple[Choice | None, str]:
    """Return a choice by the first solver that has one: the exact ones first."""
    try:
        return solve_by_elimination(problem, bytes_price=bytes_price), ELIMINATION
    except TooWide:
        from search.ilp.block_lp import num_pairs, solve_by_linear_program
        from search.op_layout.elimination.decompose import solve_by_decomposition
    if num_pairs(problem) <= _MOST_PAIRS:
        choice = solve_by_linear_program(
            problem, bytes_price=bytes_price, time_limit_s=time_limit_s
        )
        if choice is not None:
            return choice, "linear programs"
    choice = solve_by_decomposition(problem, bytes_price=bytes_price, time_limit_s=time_limit_s)
    return choice, "Lagrangian decomposition"
