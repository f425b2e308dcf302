"""The chain DP against brute force, by hand, and against what it promises about long chains."""

import time
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from planner.language.schedule import build_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from search.partition.chain_dp import smallest_peak, solve_chain
from search.partition.chain_paths import Paths
from search.partition.solvers import solve
from tests.referees.cuts import (
    cut_peak,
    cut_value,
    smallest_peak_by_brute_force,
    solve_by_brute_force,
)
from tests.search.chains import SCHEDULES, random_chain, stated, uniform_chain


def test_equals_brute_force_on_500_random_small_chains():
    """M17: the DP's answer is the best of all cuts under the memory cap, and None without one."""
    rng = np.random.default_rng(7)
    infeasible = 0
    for _ in range(500):
        problem = random_chain(rng)
        best, found = solve_by_brute_force(problem), solve_chain(problem).cut
        if best is None:
            infeasible += 1
            assert found is None
            continue
        assert found is not None
        assert found.value == pytest.approx(best.value, rel=1e-12)
        paths = Paths.of_all(problem)
        assert cut_value(paths, found.cuts, found.choices) == pytest.approx(found.value)
        for above in (1 + 1e-12, 1.2):
            assert solve_chain(problem, ceiling=above * best.value).cut == found
        assert solve_chain(problem, ceiling=(1 - 1e-6) * best.value).cut is None
    assert 20 < infeasible < 400, "the memory limits should matter, yet not always"


def test_cuts_are_where_stages_may_start_and_the_best_of_these():
    """Against every way to cut there, each solved for itself; no solver cuts elsewhere."""
    rng = np.random.default_rng(17)
    infeasible = 0
    for _ in range(150):
        free = random_chain(rng)
        n, stages = free.num_blocks, free.num_stages
        some = np.flatnonzero(rng.random(n) < 0.7).tolist()
        starts = tuple(sorted({0, *some}))
        inner = [place for place in starts if place]
        each = [
            solve_chain(replace(free, cuts=(0, *places, n))).cut
            for places in combinations(inner, stages - 1)
        ]
        best = min((cut.value for cut in each if cut), default=None)
        problem = replace(free, starts=starts)
        found = solve_chain(problem).cut
        quick = solve(problem, solver="recursive", ceiling=np.inf).cut
        for cut in (found, quick):
            assert cut is None or set(cut.cuts[:-1]) <= set(starts)
        if best is None:
            infeasible += 1
            assert found is None
            assert quick is None
            continue
        assert found is not None
        assert found.value == pytest.approx(best, rel=1e-12)
        peak = smallest_peak(problem)
        assert peak is not None
        assert set(peak.cuts[:-1]) <= set(starts)
    assert 10 < infeasible < 120, "the places should matter, yet not always"


def test_smallest_peak_equals_brute_force():
    rng = np.random.default_rng(11)
    for _ in range(100):
        problem = random_chain(rng)
        least = smallest_peak(problem)
        assert least is not None
        assert least.value == pytest.approx(smallest_peak_by_brute_force(problem))
        paths = Paths.of_all(problem)
        assert cut_peak(paths, least.cuts, least.choices) == pytest.approx(least.value)


@pytest.mark.parametrize(
    ("schedule", "is_stated"),
    [*((schedule, True) for schedule in SCHEDULES), ("zb_h1", False), ("1f1b", False)],
)
def test_the_bound_is_never_above_the_simulator(schedule, is_stated):
    """X1: what the DP minimises is a lower bound of the simulated step, and a close one."""
    rng = np.random.default_rng(13)
    ratios = []
    while len(ratios) < 200:
        problem = random_chain(rng, schedule, is_stated=is_stated)
        found = solve_chain(problem).cut
        if found is None or problem.num_stages < 2:
            continue
        costs = Paths.of_all(problem).costs
        runs = [
            (c, end - first - 1, first)
            for first, end, c in zip(found.cuts, found.cuts[1:], found.choices, strict=False)
        ]
        transfers = [float(problem.transfer_s[first]) for _, _, first in runs]
        backs = [float(problem.back_transfer_s[first]) for _, _, first in runs]
        # Stages that recompute send nothing ahead, others the first block's or all of it.
        weights = problem.block_weight_s
        backward = [float(costs.backward_s[run]) for run in runs]
        split = [float(weights[i:j].sum()) for i, j in pairwise(found.cuts)]
        sends = list(zip(runs, zip(found.cuts, found.cuts[1:], strict=False), strict=True))
        first = tuple(float(weights[i]) * (c == 0) for (c, _, _), (i, _) in sends)
        whole = tuple(float(weights[i:j].sum()) * (c == 0) for (c, _, _), (i, j) in sends)
        timeline = simulate(
            build_schedule(
                schedule, pp=problem.num_stages, vpp=1, num_microbatches=problem.num_microbatches
            ),
            JobSeconds(
                forward_s=tuple(float(costs.forward_s[run]) for run in runs),
                backward_input_s=tuple(b - w for b, w in zip(backward, split, strict=True)),
                backward_weight_s=tuple(split),
                receive_forward_s=tuple(transfers),
                receive_backward_s=(*backs[1:], 0.0),
                sends_ahead_s=first,
                last_sends_ahead_s=whole,
            ),
        )
        tails = [float(costs.tail_s[run[1:]]) for run in runs]
        step_s = max(e + t for e, t in zip(timeline.rank_end_s, tails, strict=True))
        assert found.value <= step_s * (1 + 1e-9)
        ratios.append(found.value / step_s)
    assert np.mean(ratios) > (0.93 if is_stated else 0.7)


def test_equal_stages_give_the_textbook_step_time():
    """4 stages of 2 blocks, 3 s per block: (m + pp - 1) * 6 s = 66 s for m = 8."""
    found = solve_chain(uniform_chain(8, 4, 8)).cut
    assert found is not None
    assert found.cuts == (0, 2, 4, 6, 8)
    assert found.value == pytest.approx((8 + 4 - 1) * 6.0)


def test_equal_stages_of_zb_h1_wait_for_input_gradients_alone():
    """4 stages of 2 blocks, F, I and W of 2 s each: 8 * 6 s and (pp - 1) (F + I - W) = 6 s."""
    problem = uniform_chain(8, 4, 8)
    order = stated("zb_h1", 4, 8)
    problem = replace(problem, order=order, block_weight_s=problem.block_backward_s / 2)
    found = solve_chain(problem).cut
    assert found is not None
    assert found.cuts == (0, 2, 4, 6, 8)
    assert found.value == pytest.approx(8 * 6.0 + 6.0)


def test_the_first_stage_gets_fewer_blocks_when_its_tail_is_long():
    """A tail of 40 s per block on stage 0 follows everything; one block less there saves it.

    6 blocks, 2 stages, m = 8: 3+3 takes 9 * 9 s + 3 * 40 s = 201 s, 2+4 takes
    6 s + 8 * 12 s + 2 * 40 s = 182 s (or its own 2 s + 96 s + 160 s = 258 s tail: 4 blocks on
    stage 1). The tail of stage 1 runs beside stage 0's, so 3+3 is right after all.
    """
    found = solve_chain(uniform_chain(6, 2, 8, tail_s=40.0)).cut
    assert found is not None
    assert found.cuts == (0, 3, 6)
    assert found.value == pytest.approx(9 * 9.0 + 3 * 40.0)


def test_in_flight_memory_moves_blocks_to_later_stages():
    """Stage 0 of 1F1B keeps 2 microbatches, stage 1 one; 4 B resident, 1 B kept per block.

    Three blocks on stage 0 need 3 * (4 + 2) = 18 B, on stage 1 3 * (4 + 1) = 15 B: 3+3 fits
    18 B. In 17 B stage 0 takes 2 blocks (12 B) and stage 1 three (15 B), so 5 fit, not 6.
    """
    fits = solve_chain(uniform_chain(6, 2, 8, limit=18.0)).cut
    assert fits is not None
    assert fits.cuts == (0, 3, 6)
    assert solve_chain(uniform_chain(6, 2, 8, limit=17.0)).cut is None
    moved = solve_chain(uniform_chain(5, 2, 8, limit=17.0)).cut
    assert moved is not None
    assert moved.cuts == (0, 2, 5)


def test_a_thousand_blocks_take_well_under_a_second():
    """M18: the exact DP itself handles 1,000 blocks; longer stages are skipped with proof."""
    problem = uniform_chain(1000, 40, 80)
    start = time.process_time()
    found = solve_chain(problem).cut
    assert time.process_time() - start < 1.0
    assert found is not None
    assert found.value == pytest.approx((80 + 39) * 75.0)
