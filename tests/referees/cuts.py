"""Every cut of a tiny chain, one after the other: the referee of `chain_dp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from search.partition.chain_paths import Paths
from search.partition.chain_problem import ChainProblem, Cut


def all_cuts(problem: ChainProblem) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield every (cuts, choices); C(n-1, S-1) * c**S of them."""
    n, stages = problem.num_blocks, problem.num_stages
    for inner in combinations(range(1, n), stages - 1):
        for choices in product(range(len(problem.choices)), repeat=stages):
            yield (0, *inner, n), choices


def solve_by_brute_force(problem: ChainProblem) -> Cut | None:
    """Return the best cut by trying all, or None when none fits."""
    paths = Paths.of_all(problem)
    best: Cut | None = None
    for cuts, choices in all_cuts(problem):
        value = cut_value(paths, cuts, choices)
        if value < (best.value if best else float("inf")):
            best = Cut(cuts=cuts, choices=choices, value=value)
    return best


def smallest_peak_by_brute_force(problem: ChainProblem) -> float:
    """Return the fewest bytes that the largest rank of any cut needs."""
    paths = Paths.of_all(problem)
    return min(
        (cut_peak(paths, cuts, choices) for cuts, choices in all_cuts(problem)),
        default=float("inf"),
    )


def cut_value(paths: Paths, cuts: Sequence[int], choices: Sequence[int]) -> float:
    """Return the bound of one given cut, or infinity when a stage does not fit.

    `paths` must be wide enough for the longest stage.
    """
    problem, first = paths.problem, cuts[1]
    first_tail = float(paths.of_stage(0).tail[first - 1, 0] + problem.first_weight_s[first])
    worst = 0.0
    for stage, choice in enumerate(choices):
        first, end = cuts[stage], cuts[stage + 1]
        own = paths.of_stage(stage).own(first_tail)
        worst = max(worst, float(own[choice, end - first - 1, first]))
    return worst


def cut_peak(paths: Paths, cuts: Sequence[int], choices: Sequence[int]) -> float:
    """Return the bytes of the rank that needs most under one given cut."""
    return max(
        float(paths.least_bytes(stage, choice)[cuts[stage + 1] - cuts[stage] - 1, cuts[stage]])
        for stage, choice in enumerate(choices)
    )
