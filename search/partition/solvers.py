"""All solvers of a chain problem behind one door, by the name that a request gives.

    dp          `chain_dp`, exact
    ilp         `search.ilp.joint`, exact: an integer program; what it has no answer for, as it is
                too large or its time is up, is solved by chain_dp
    recursive   bisection, below: fast, and usually close to the exact cut

Bisection splits the chain into two parts with the halves of the stages, at the block boundary where
the two parts' times are nearest to their numbers of stages; then each part likewise. Afterwards,
boundaries move one block at a time while that lowers the bound or makes the cut fit. The stages of
a given cut take the best recompute choices that fit. O(S log n) for the splits and O(S^2) runs
priced a sweep of moves, whatever n is, as only the runs of the cuts at hand are looked at. What it
misses against `chain_dp` is its gap, which callers report; it is never better than exact.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from search.ilp.joint import NoAnswer, solve_by_joint_program
from search.partition.chain_dp import Solved, solve_chain
from search.partition.chain_problem import ChainProblem, Cut

_MOST_SWEEPS = 20


def solve(problem: ChainProblem, *, solver: str, ceiling: float) -> Solved:
    """Return the cut with the smallest bound, if any is under the ceiling, which bisection does not
    read.
    """
    if solver == "dp":
        return solve_chain(problem, ceiling=ceiling)
    if solver == "recursive":
        cut = solve_by_bisection(problem)
        return Solved(cut=cut, fits=cut is not None)
    # Under a ceiling the program does not tell what does not fit from what is too slow.
    is_limited = bool(np.isfinite(ceiling))
    # A ceiling leaves a small program; else bisection's cut makes it one.
    hint = None if is_limited else solve_by_bisection(problem)
    if hint is not None:
        ceiling = hint.value
    try:
        cut = solve_by_joint_program(problem, ceiling=ceiling, hint=hint)
    except NoAnswer:
        return solve_chain(problem, ceiling=ceiling)
    return Solved(cut=cut, fits=cut is not None or is_limited)


def solve_by_bisection(problem: ChainProblem) -> Cut | None:
    """Return a good cut, or None when none that fits was found (one may exist)."""
    stages, places = problem.num_stages, np.flatnonzero(problem.may_cut).tolist()
    # What lies between two places where the chain may be cut is a piece.
    pieces = len(places) - 1
    if stages > pieces:
        return None
    sums = (problem.before_f + problem.before_b)[places].tolist()
    cuts = [places.index(cut) for cut in problem.cuts] or [
        0, *_split(sums, 0, pieces, stages), pieces,
    ]  # fmt: skip
    # Local search: a boundary moves a piece either way while that lowers the bound.
    best = _valued(problem, [places[cut] for cut in cuts])
    for _ in range(0 if problem.cuts else _MOST_SWEEPS):
        improved = False
        for index in range(1, stages):
            for step in (-1, 1):
                moved = [*cuts]
                moved[index] += step
                if not moved[index - 1] < moved[index] < moved[index + 1]:
                    continue
                found = _valued(problem, [places[cut] for cut in moved])
                if found.value < best.value:
                    cuts, best, improved = moved, found, True
        if not improved:
            break
    return best if np.isfinite(best.value) else None


def _split(sums: list[float], first: int, end: int, stages: int) -> list[int]:
    """Return the inner cuts of blocks first..end-1 for that many stages."""
    if stages == 1:
        return []
    # With an odd number the right part has a stage more.
    left = stages // 2
    # The halves' shares of the work are as their numbers of stages.
    goal = sums[first] + (sums[end] - sums[first]) * left / stages
    at = bisect_left(sums, goal, first, end)
    if at > first and goal - sums[at - 1] < sums[at] - goal:
        at -= 1
    # Each stage of either half gets a block at least.
    at = min(max(at, first + left), end - (stages - left))
    return [*_split(sums, first, at, left), at, *_split(sums, at, end, stages - left)]


def _valued(problem: ChainProblem, cuts: list[int]) -> Cut:
    """Return the cut with the best of its choices that fit; its bound is infinite without any."""
    given = tuple(cuts)
    found = solve_chain(replace(problem, cuts=given)).cut
    return found or Cut(cuts=given, choices=(0,) * problem.num_stages, value=np.inf)
