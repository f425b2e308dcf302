"""Where stages may start under a ceiling: never past the best cut, and nowhere under half of it."""

import numpy as np

from search.partition.chain_reach import possible_starts
from tests.referees.cuts import solve_by_brute_force
from tests.search.chains import random_chain


def test_the_best_cut_is_within_reach():
    """M17: of random chains; a ceiling far below the best leaves no start."""
    rng = np.random.default_rng(41)
    solved = emptied = 0
    while solved < 60:
        problem = random_chain(rng)
        best = solve_by_brute_force(problem)
        if best is None:
            continue
        starts = possible_starts(problem, best.value)
        assert starts is not None
        for cut, (earliest, latest) in zip(best.cuts, starts, strict=True):
            assert earliest <= cut <= latest
        solved += 1
        emptied += possible_starts(problem, best.value / 4) is None
    assert emptied > solved / 2
