"""The chain DP against brute force, by hand, and against what it promises about long chains."""

import time

import numpy as np
import pytest

from search.brute_force import smallest_peak_by_brute_force, solve_by_brute_force
from search.chain_dp import FAMILIES, ChainProblem, cut_value, smallest_peak, solve_chain


def random_problem(rng: np.random.Generator) -> ChainProblem:
    n = int(rng.integers(1, 9))
    stages = int(rng.integers(1, min(n, 4) + 1))
    m = int(rng.integers(stages, 12))
    two = bool(rng.integers(2))
    forward = rng.uniform(0.1, 3.0, n) if rng.integers(2) else rng.integers(1, 4, n).astype(float)
    backward = 2 * forward * rng.uniform(0.8, 1.2)
    saved, inputs = rng.uniform(1, 9, n), rng.uniform(0.1, 1, n)
    ties = ((0, n - 1, 2.0),) if n > 1 and rng.integers(2) else ()
    return ChainProblem(
        forward_s=np.stack([forward, forward]) if two else forward[None],
        backward_s=np.stack([backward, backward + forward]) if two else backward[None],
        saved_bytes=np.stack([saved, inputs]) if two else saved[None],
        working_bytes=np.stack([0 * saved, saved]) if two else 0 * saved[None],
        stage_saved_bytes=np.zeros((2 if two else 1, n)),
        resident_bytes=rng.uniform(3, 30, n),
        hop_s=rng.uniform(0, 0.5, n),
        tail_s=rng.uniform(0, 4.0, n),
        fixed_bytes=1.0,
        in_flight=tuple(min(m, stages - s) for s in range(stages)),
        num_microbatches=m,
        memory_limit_bytes=float(rng.uniform(30, 160)),
        family=FAMILIES[int(rng.integers(len(FAMILIES)))],
        ties=ties,
        choices=("none", "full") if two else ("none",),
    )


def test_equals_brute_force_on_500_random_small_chains():
    """M17: the DP's answer is the best of all cuts under the memory cap, and is None with it."""
    rng = np.random.default_rng(7)
    infeasible = 0
    for _ in range(500):
        problem = random_problem(rng)
        best, found = solve_by_brute_force(problem), solve_chain(problem)
        if best is None:
            infeasible += 1
            assert found is None
            continue
        assert found is not None
        assert found.value == pytest.approx(best.value, rel=1e-12)
        assert cut_value(problem, found.cuts, found.choices) == pytest.approx(found.value)
    assert 20 < infeasible < 400, "the memory limits should matter, yet not always"


def test_smallest_peak_equals_brute_force():
    rng = np.random.default_rng(11)
    for _ in range(100):
        problem = random_problem(rng)
        least = smallest_peak(problem)
        assert least is not None
        assert least.value == pytest.approx(smallest_peak_by_brute_force(problem))


def uniform(n: int, stages: int, m: int, **changes) -> ChainProblem:
    ones = np.ones((1, n))
    values = {
        "forward_s": ones,
        "backward_s": 2 * ones,
        "saved_bytes": ones,
        "working_bytes": 0 * ones,
        "stage_saved_bytes": 0 * ones,
        "resident_bytes": 4 * ones[0],
        "hop_s": 0 * ones[0],
        "tail_s": 0 * ones[0],
        "fixed_bytes": 0.0,
        "in_flight": tuple(min(m, stages - s) for s in range(stages)),
        "num_microbatches": m,
        "memory_limit_bytes": float("inf"),
        "family": "1F1B",
    }
    return ChainProblem(**{**values, **changes})


def test_equal_stages_give_the_textbook_step_time():
    """4 stages of 2 blocks, 3 s per block: (m + pp - 1) * 6 s = 66 s for m = 8."""
    found = solve_chain(uniform(8, 4, 8))
    assert found is not None
    assert found.cuts == (0, 2, 4, 6, 8)
    assert found.value == pytest.approx((8 + 4 - 1) * 6.0)


def test_in_flight_memory_moves_blocks_to_later_stages():
    """Stage 0 of 1F1B keeps 2 microbatches, stage 1 one: 5 of 6 B each per block, limit 18.

    Three blocks on stage 0 need 3 * (4 + 2) = 18 B, on stage 1 3 * (4 + 1) = 15 B: balanced
    fits at 18 and not at 17, where stage 0 gets 2 blocks and stage 1 four (20 B): nothing.
    """
    fits = solve_chain(uniform(6, 2, 8, memory_limit_bytes=18.0))
    assert fits is not None
    assert fits.cuts == (0, 3, 6)
    assert solve_chain(uniform(6, 2, 8, memory_limit_bytes=17.0)) is None
    moved = solve_chain(uniform(5, 2, 8, memory_limit_bytes=17.0))
    assert moved is not None
    assert moved.cuts == (0, 2, 5)


def test_a_thousand_blocks_take_well_under_a_second():
    """M18: the exact DP itself handles 1,000 blocks; longer stages are skipped with proof."""
    start = time.perf_counter()
    found = solve_chain(uniform(1000, 40, 80))
    assert found is not None
    assert found.value == pytest.approx((80 + 39) * 75.0)
    assert time.perf_counter() - start < 1.0
