"""All solvers of a chain problem behind one door, by the name that a request gives."""

from __future__ import annotations

from math import isfinite

from search.ilp.joint import solve_by_joint_program
from search.partition.bisect import solve_by_bisection
from search.partition.chain_dp import Solved, solve_chain
from search.partition.chain_problem import ChainProblem

INEXACT = "recursive"
"""The value of its cut proves nothing."""


def solve(problem: ChainProblem, *, solver: str, ceiling: float) -> Solved:
    """Return the cut with the smallest bound, if any is under the ceiling, which bisection does not
    read.
    """
    if solver == "dp":
        return solve_chain(problem, ceiling=ceiling)
    if solver == "ilp":
        cut = solve_by_joint_program(problem, ceiling=ceiling)
        # Under a ceiling the program does not tell what does not fit from what is too slow.
        return Solved(cut=cut, fits=cut is not None or isfinite(ceiling))
    cut = solve_by_bisection(problem)
    return Solved(cut=cut, fits=cut is not None)
