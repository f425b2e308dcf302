"""The exact solver as referee of the synthesis, and as a check of the lower bound."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from planner.language.schedule import JobKind, Schedule
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.schedule.synthesis.synthesize import Pipeline, synthesize_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate, simulate_until_stuck
from planner.language.schedule.validate import validate_schedule
from tests.referees.schedules import solve_schedule_exactly


def small_pipeline(rng: random.Random) -> Pipeline:
    pp, vpp, m = rng.choice([(2, 1, 4), (3, 1, 4), (4, 1, 4), (2, 2, 4), (3, 1, 5)])
    placed = rng.choice([loop_placement, fold_placement])(pp, vpp)
    forward_s = [rng.uniform(0.5, 2.0) for _ in placed]
    return Pipeline(
        stage_to_pp_rank=placed,
        num_microbatches=m,
        times=JobSeconds.of_stages(
            forward_s=tuple(forward_s),
            backward_input_s=tuple(f * rng.uniform(0.8, 1.3) for f in forward_s),
            backward_weight_s=tuple(f * rng.uniform(0.6, 1.1) for f in forward_s),
            transfer_s=rng.choice([0.0, 0.3]),
        ),
        live_bytes=(1.0,) * len(placed),
        limit_bytes=(float(rng.choice([2 * vpp, pp * vpp, 1000])),) * pp,
    )


def test_synthesis_is_within_two_percent_of_the_optimum() -> None:
    """P17: greedy with improvement against CP-SAT on 12 small uneven pipelines."""
    rng = random.Random(0)
    gaps = []
    for _ in range(12):
        pipeline = small_pipeline(rng)
        split = rng.random() < 0.7
        made = synthesize_schedule(pipeline, split_backward=split)
        exact = solve_schedule_exactly(pipeline, split_backward=split, time_limit_s=20)
        validate_schedule(exact.schedule)
        assert pipeline.fits(exact.schedule)
        assert exact.lower_bound_s <= exact.step_s * (1 + 1e-9)
        assert made.lower_bound_s <= exact.step_s * (1 + 1e-9)
        if exact.is_optimal:
            gaps.append(made.step_s / exact.step_s - 1)
    assert len(gaps) >= 9
    assert max(gaps) < 0.02


def all_row_orders(pipeline: Pipeline, rank: int) -> list[tuple[tuple[str, int], ...]]:
    """Every order of a one-stage rank's F and B counts that keeps F_i before B_i."""
    m = pipeline.num_microbatches
    orders = []
    for forwards in itertools.combinations(range(2 * m), m):
        row = ["F" if position in forwards else "B" for position in range(2 * m)]
        live = list(itertools.accumulate(1 if kind == "F" else -1 for kind in row))
        if min(live) >= 0 and max(live) <= pipeline.limit_bytes[rank]:
            orders.append(tuple((kind, row[:p].count(kind)) for p, kind in enumerate(row)))
    return orders


@pytest.mark.parametrize("seed", range(4))
def test_exact_equals_brute_force(seed: int) -> None:
    """X1: all tables of two ranks and three microbatches, played one by one."""
    rng = random.Random(seed)
    times = JobSeconds.of_stages(
        forward_s=(rng.uniform(0.5, 2), rng.uniform(0.5, 2)),
        backward_input_s=(rng.uniform(0.5, 2), rng.uniform(0.5, 2)),
        backward_weight_s=(rng.uniform(0.5, 2), rng.uniform(0.5, 2)),
        transfer_s=0.2,
    )
    pipeline = Pipeline(
        stage_to_pp_rank=(0, 1),
        num_microbatches=3,
        times=times,
        live_bytes=(1.0, 1.0),
        limit_bytes=(float(rng.choice([2, 3])), 2.0),
    )
    best = math.inf
    for rows in itertools.product(all_row_orders(pipeline, 0), all_row_orders(pipeline, 1)):
        text = [" ".join(f"{stage}{kind}{i}" for kind, i in row) for stage, row in enumerate(rows)]
        schedule = Schedule.from_json(
            {"name": "x", "stage_to_pp_rank": (0, 1), "num_microbatches": 3, "jobs": text}
        )
        if not simulate_until_stuck(schedule, times).stuck:
            best = min(best, simulate(schedule, times, links="free").makespan_s)
    exact = solve_schedule_exactly(pipeline, split_backward=False)
    assert exact.is_optimal
    assert exact.step_s == pytest.approx(best)
    kinds = {job.kind for row in exact.schedule.jobs for job in row}
    assert kinds == {JobKind.FORWARD, JobKind.FULL_BACKWARD}
