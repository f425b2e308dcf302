"""Recursive bisection and the joint integer program beside the chain DP."""

import time

import numpy as np
import pytest

from search.ilp.joint import solve_by_joint_program
from search.partition.bisect import solve_by_bisection
from search.partition.chain_dp import solve_chain
from search.partition.solvers import INEXACT, solve
from search.request import SOLVERS
from tests.search.chains import random_chain, uniform_chain


def test_bisection_is_never_better_than_exact_and_close_to_it():
    """M18: the gap of 300 random small chains, recorded."""
    rng = np.random.default_rng(21)
    gaps, missed = [], 0
    for _ in range(300):
        problem = random_chain(rng)
        exact, quick = solve_chain(problem).cut, solve_by_bisection(problem)
        if exact is None:
            assert quick is None
        elif quick is None:
            missed += 1
        else:
            assert quick.value >= exact.value * (1 - 1e-12)
            gaps.append(quick.value / exact.value - 1)
    assert np.mean(gaps) < 0.02
    assert np.median(gaps) == pytest.approx(0.0, abs=1e-9)
    assert missed < 15


def test_bisection_of_a_thousand_blocks_takes_under_two_seconds():
    """M18: only the runs of the cuts at hand are priced, and here the even cut is the best one."""
    problem = uniform_chain(1000, 40, 80)
    start = time.process_time()
    found = solve_by_bisection(problem)
    assert time.process_time() - start < 2.0
    assert found is not None
    assert found.value == pytest.approx((80 + 39) * 75.0)


def test_the_joint_program_agrees_with_the_chain_dp():
    """M17: CP-SAT over cuts, recompute and memory at once finds the DP's optimum."""
    rng = np.random.default_rng(22)
    for _ in range(25):
        problem = random_chain(rng)
        exact, joint = solve_chain(problem).cut, solve_by_joint_program(problem)
        if exact is None:
            assert joint is None
            continue
        assert joint is not None
        assert joint.value == pytest.approx(exact.value, rel=1e-6)


def test_a_joint_program_too_large_to_solve_says_so():
    with pytest.raises(ValueError, match=r"1000 blocks on 8 stages .* use `solver` dp"):
        solve_by_joint_program(uniform_chain(1000, 8, 16))


def test_every_solver_that_a_request_may_name_solves_and_only_one_is_inexact():
    """A ceiling under the best cut leaves the dynamic program none, though one fits."""
    rng = np.random.default_rng(23)
    proved = 0
    for _ in range(12):
        problem = random_chain(rng)
        best = solve_chain(problem).cut
        for name in SOLVERS:
            found = solve(problem, solver=name, ceiling=np.inf)
            if name != INEXACT:
                assert found.fits == (best is not None)
            if best is None or found.cut is None:
                assert found.cut is None
                continue
            if name != INEXACT:
                assert found.cut.value == pytest.approx(best.value, rel=1e-6)
                proved += 1
            assert found.cut.value >= best.value * (1 - 1e-6)
        if best is not None:
            under = solve(problem, solver="dp", ceiling=0.99 * best.value)
            assert under.cut is None
    assert proved > 8
