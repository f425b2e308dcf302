"""All solvers of a chain problem behind one door, by the name that a request gives."""

from __future__ import annotations

from collections.abc import Callable

from search.ilp.joint import solve_by_joint_program
from search.partition.bisect import solve_by_bisection
from search.partition.chain_dp import Solved, solve_chain
from search.partition.chain_problem import ChainProblem, Cut

_OTHERS: dict[str, Callable[[ChainProblem], Cut | None]] = {
    "recursive": solve_by_bisection,
    "ilp": solve_by_joint_program,
}
"""Beside the dynamic program."""

INEXACT = "recursive"
"""The value of its cut proves nothing."""


def solve(problem: ChainProblem, *, solver: str, ceiling: float) -> Solved:
    """Return the cut with the smallest bound, if any is under the ceiling, which other solvers than
    the dynamic program do not read.
    """
    if solver == "dp":
        return solve_chain(problem, ceiling=ceiling)
    cut = _OTHERS[solver](problem)
    return Solved(cut=cut, fits=cut is not None)
