"""Recursive bisection and integer programs beside the dynamic program, alone and in a search."""

import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from ortools.sat.python import cp_model

from planner.errors import PlannerError
from search import SearchRequest, find_plan
from search.ilp import joint
from search.ilp.joint import NoAnswer, solve_by_joint_program
from search.partition.chain_dp import solve_chain
from search.partition.solvers import solve, solve_by_bisection
from search.request import INEXACT_SOLVER, SOLVERS
from tests.captures import capture_tiny
from tests.search.chains import random_chain, uniform_chain
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4)


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


def ask(**choices) -> SearchRequest:
    return SearchRequest(num_devices=4, global_batch=8, **choices)


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


def test_a_ceiling_keeps_the_joint_program_small():
    """A thousand blocks on 8 stages: bisection's cut, which is the best, leaves one run a stage."""
    found = solve(uniform_chain(1000, 8, 16), solver="ilp", ceiling=np.inf).cut
    assert found is not None
    assert found.value == pytest.approx((16 + 7) * 375.0)
    under = solve_by_joint_program(uniform_chain(1000, 8, 16), ceiling=0.999 * found.value)
    assert under is None


def test_a_joint_program_without_an_answer_is_solved_by_the_chain_dp(monkeypatch):
    """A search has a plan in hand by then, or another solver that finds the same."""
    problem = uniform_chain(1000, 8, 16)
    with pytest.raises(NoAnswer, match="0 s"):
        solve_by_joint_program(problem, ceiling=23 * 376.0, time_limit_s=0.0)
    with pytest.raises(NoAnswer, match="variables, more than"):
        solve_by_joint_program(problem, ceiling=1e9)
    monkeypatch.setattr(joint, "MOST_VARIABLES", 0)
    found = solve(problem, solver="ilp", ceiling=np.inf).cut
    assert found is not None
    assert found.value == pytest.approx((16 + 7) * 375.0)


def test_a_cut_that_is_not_proved_has_the_bound_of_all(monkeypatch):
    """Where time is up the best so far is an answer, and its value is below every cut's."""
    rng = np.random.default_rng(24)
    stopped = 0
    for _ in range(12):
        problem = random_chain(rng)
        exact = solve_chain(problem).cut
        if exact is None:
            continue
        # A solver that stops at its first answer, as one whose time is up.
        with monkeypatch.context() as patch:
            made = cp_model.CpSolver

            def first_alone(made=made):
                solver = made()
                solver.parameters.stop_after_first_solution = True
                solver.parameters.cp_model_presolve = False
                return solver

            patch.setattr(cp_model, "CpSolver", first_alone)
            found = solve_by_joint_program(problem, hint=solve_by_bisection(problem))
        assert found is not None
        assert found.value <= exact.value * (1 + 1e-6)
        stopped += found.cuts != exact.cuts or found.value < exact.value * (1 - 1e-6)
    assert stopped


def test_the_joint_program_keeps_boundaries_that_are_given():
    """Five blocks of 3 s on 2 stages, cut unevenly: the second stage's 4 microbatches of 12 s come
    after 1 s of forward, and its last gradient passes the first stage's backward.
    """
    problem = replace(uniform_chain(5, 2, 4), cuts=(0, 1, 5))
    found = solve_by_joint_program(problem)
    assert found is not None
    assert found.cuts == (0, 1, 5)
    assert found.value == pytest.approx(1 + 4 * 12 + 2)


def test_every_solver_that_a_request_may_name_solves_and_only_one_is_inexact():
    """A ceiling under the best cut leaves the dynamic program none, though one fits."""
    rng = np.random.default_rng(23)
    proved = 0
    for _ in range(12):
        problem = random_chain(rng)
        best = solve_chain(problem).cut
        for name in SOLVERS:
            found = solve(problem, solver=name, ceiling=np.inf)
            if name != INEXACT_SOLVER:
                assert found.fits == (best is not None)
            if best is None or found.cut is None:
                assert found.cut is None
                continue
            if name != INEXACT_SOLVER:
                assert found.cut.value == pytest.approx(best.value, rel=1e-6)
                proved += 1
            assert found.cut.value >= best.value * (1 - 1e-6)
        if best is not None:
            for name in ("dp", "ilp"):
                assert solve(problem, solver=name, ceiling=0.99 * best.value).cut is None
    assert proved > 8


@pytest.mark.parametrize("solver", ["recursive", "ilp"])
def test_other_searchers_keep_stages_that_are_given(gpt, solver):
    """An uneven balance is no faster; it is what was asked for."""
    balance = (1, len(gpt.blocks) - 1)
    request = ask(pp=2, vpp=1, balance=balance, schedule="1f1b")
    exact = find_plan(gpt, MACHINE, request).plan
    plan = find_plan(gpt, MACHINE, replace(request, solver=solver)).plan
    assert tuple(len(stage.blocks) for stage in plan.stages) == balance
    assert plan.estimate["step_s"] == pytest.approx(exact.estimate["step_s"], rel=1e-9)


def test_integer_programs_place_ops_and_cut_stages_as_exactly(gpt):
    """With `solver` ilp both are integer programs; the plan is as fast as the other solvers'."""
    for choices in ({"tp": 2}, {"pp": 2, "vpp": 1}):
        exact = find_plan(gpt, MACHINE, ask(**choices))
        found = find_plan(gpt, MACHINE, ask(solver="ilp", **choices))
        assert found.plan.estimate["step_s"] == pytest.approx(exact.plan.estimate["step_s"])
        assert found.certificate.gap == pytest.approx(exact.certificate.gap, abs=1e-9)
    proved_by = dict(find_plan(gpt, MACHINE, ask(tp=2, solver="ilp")).certificate.proved_by)
    assert proved_by["placements in blocks"].startswith("integer programs")
    assert proved_by["stage boundaries"].startswith("joint integer program")


def test_integer_programs_need_ortools(gpt, monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(PlannerError, match=r"OR-tools, which .* install ortools, or use `solver`"):
        find_plan(gpt, MACHINE, ask(solver="ilp"))
    assert find_plan(gpt, MACHINE, ask()).plan is not None
