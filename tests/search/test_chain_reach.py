"""Where stages may start under a ceiling: never past the best cut, and nowhere under half of it."""

import numpy as np

from search.partition import chain_dp
from search.partition.chain_dp import Solved, solve_chain
from search.partition.chain_reach import possible_starts
from tests.referees.cuts import solve_by_brute_force
from tests.search.chains import random_chain, uniform_chain


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


def test_memory_limits_starts_before_any_ceiling_is_known(monkeypatch):
    """N6: rank s holds limit / (4 + 8 - s) blocks; of a thousand little more than all of them, or
    fewer, which is known before any run is priced."""
    starts = possible_starts(uniform_chain(1000, 8, 8, limit=985.0), np.inf)
    assert max(latest - earliest for earliest, latest in starts) <= 4
    assert solve_chain(uniform_chain(1000, 8, 8, limit=985.0)).cut is not None
    monkeypatch.setattr(chain_dp, "runs_by_stage", None)
    assert solve_chain(uniform_chain(1000, 8, 8, limit=970.0)) == Solved(cut=None, fits=False)
