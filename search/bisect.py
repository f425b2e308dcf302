"""Stage boundaries by recursive bisection: fast, and usually close to the exact cut.

Split the chain into two parts with the halves of the stages, at the block boundary where the
two parts' times are nearest to their numbers of stages; then each part likewise. Afterwards,
boundaries move one block at a time while that lowers the bound or makes the cut fit. Each
stage takes the first recompute choice that fits.

Complexity: O(S log n) for the splits and O(S) path evaluations a sweep of moves; no table of
runs is needed, so it reads single entries of a band only as wide as its longest stage. What it
misses against `chain_dp` is its gap, which callers report; it is never better than exact.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np

from search.chain_dp import cut_value
from search.chain_paths import Paths
from search.chain_problem import ChainProblem, Cut

_MOST_SWEEPS = 20


def solve_by_bisection(problem: ChainProblem) -> Cut | None:
    """Return a good cut, or None when none that fits was found (one may exist)."""
    n, stages = problem.num_blocks, problem.num_stages
    if stages > n:
        return None
    sums = (problem.before_f + problem.before_b).tolist()
    cuts = [0, *_split(sums, 0, n, stages), n]
    best = _valued(problem, cuts)
    for _ in range(_MOST_SWEEPS):
        improved = False
        for index in range(1, stages):
            for step in (-1, 1):
                moved = [*cuts]
                moved[index] += step
                if not moved[index - 1] < moved[index] < moved[index + 1]:
                    continue
                found = _valued(problem, moved)
                if found.value < best.value:
                    cuts, best, improved = moved, found, True
        if not improved:
            break
    return best if np.isfinite(best.value) else None


def _split(sums: list[float], first: int, end: int, stages: int) -> list[int]:
    """Return the inner cuts of blocks first..end-1 for that many stages."""
    if stages == 1:
        return []
    left = stages // 2
    goal = sums[first] + (sums[end] - sums[first]) * left / stages
    at = bisect_left(sums, goal, first, end)
    if at > first and goal - sums[at - 1] < sums[at] - goal:
        at -= 1
    at = min(max(at, first + left), end - (stages - left))
    return [*_split(sums, first, at, left), at, *_split(sums, at, end, stages - left)]


def _valued(problem: ChainProblem, cuts: list[int]) -> Cut:
    """Return the cut with each stage's first choice that fits, and its bound."""
    paths = Paths.of_all(problem, max(end - first for first, end in pairwise(cuts)))
    choices = []
    for stage, (first, end) in enumerate(pairwise(cuts)):
        fitting = [
            choice
            for choice in range(len(problem.choices))
            if paths.fits(stage)[choice, end - first - 1, first]
        ]
        choices.append(fitting[0] if fitting else 0)
    value = cut_value(paths, cuts, choices)
    return Cut(cuts=tuple(cuts), choices=tuple(choices), value=value)
