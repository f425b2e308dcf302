"""Synthesised tables: valid, within memory, never behind a fixed table, ahead for uneven stages."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from planner.errors import ScheduleError
from planner.language.schedule import JobKind, build_schedule
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.synthesis.synthesize import (
    Pipeline,
    lower_bound_s,
    synthesize_schedule,
)
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.language.schedule.validate import validate_schedule


def random_pipeline(rng: random.Random, *, vpp: int | None = None) -> Pipeline:
    """Uneven stages, with or without transfers and a memory limit."""
    pp, m = rng.choice([2, 3, 4, 6]), rng.choice([4, 6, 8, 12])
    vpp = vpp or rng.choice([1, 1, 2, 3])
    placed = rng.choice([loop_placement, fold_placement])(pp, vpp)
    forward_s = [rng.uniform(0.5, 2.0) for _ in placed]
    live_bytes = tuple(rng.uniform(0.5, 1.5) for _ in placed)
    count = rng.choice([1.0, pp, 1.5 * pp, math.inf])
    limits = []
    for rank in range(pp):
        microbatch_bytes = sum(
            size for r, size in zip(placed, live_bytes, strict=True) if r == rank
        )
        limits.append(microbatch_bytes * count)
    return Pipeline(
        stage_to_pp_rank=placed,
        num_microbatches=m,
        times=JobSeconds.of_stages(
            forward_s=tuple(forward_s),
            backward_input_s=tuple(f * rng.uniform(0.8, 1.3) for f in forward_s),
            backward_weight_s=tuple(f * rng.uniform(0.6, 1.1) for f in forward_s),
            transfer_s=tuple(rng.choice([0.0, 0.1, 0.4]) for _ in placed[1:]),
        ),
        live_bytes=live_bytes,
        limit_bytes=tuple(limits),
    )


def fixed_step_s(pipeline: Pipeline) -> float:
    """Step time of the best fixed table of this placement that fits, inf if none does."""
    pp, placed = pipeline.pp, pipeline.stage_to_pp_rank
    vpp, m = len(placed) // pp, pipeline.num_microbatches
    best = math.inf
    for name, spec in SCHEDULES.items():
        if spec.why_not(pp=pp, vpp=vpp, num_microbatches=m) or spec.placement(pp, vpp) != placed:
            continue
        schedule = build_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
        if pipeline.fits(schedule):
            best = min(best, simulate(schedule, pipeline.times, links="free").makespan_s)
    return best


def test_valid_and_within_memory() -> None:
    """X9: whatever the stages, the table runs, and no rank holds more than it may."""
    rng = random.Random(0)
    for _ in range(30):
        pipeline = random_pipeline(rng)
        split = rng.choice([True, False, None])
        made = synthesize_schedule(pipeline, split_backward=split, max_evaluations=30)
        validate_schedule(made.schedule)
        assert pipeline.fits(made.schedule)
        assert made.step_s == simulate(made.schedule, pipeline.times, links="free").makespan_s
        assert made.step_s >= made.lower_bound_s * (1 - 1e-9)
        if split is False:
            kinds = {job.kind for row in made.schedule.jobs for job in row}
            assert kinds == {JobKind.FORWARD, JobKind.FULL_BACKWARD}


def test_beats_fixed_tables_for_uneven_stages() -> None:
    """P14, P17: never slower than the best fixed table that fits; faster where one can be."""
    rng = random.Random(1)
    gains = []
    for _ in range(24):
        pipeline = random_pipeline(rng)
        fixed = fixed_step_s(pipeline)
        made = synthesize_schedule(pipeline, max_evaluations=150)
        assert made.step_s <= fixed * (1 + 1e-9)
        if made.lower_bound_s * 1.01 < fixed < math.inf:
            gains.append(fixed / made.step_s - 1)
    assert len(gains) > 8
    assert sum(gain > 0.005 for gain in gains) > len(gains) * 0.8
    assert sum(gains) / len(gains) > 0.04


def test_finds_the_zero_bubble_tables_by_itself() -> None:
    """P17: with equal stages and 1F1B's memory the greedy rule reaches ZB-V's step time."""
    pipeline = Pipeline(
        stage_to_pp_rank=fold_placement(4, 2),
        num_microbatches=12,
        times=JobSeconds.equal(8),
        live_bytes=(1.0,) * 8,
        limit_bytes=(8.0,) * 4,
    )
    assert lower_bound_s(pipeline) == 6 * 12 + 3
    assert synthesize_schedule(pipeline).step_s == 6 * 12 + 3


def test_more_memory_is_never_slower() -> None:
    rng = random.Random(2)
    for _ in range(8):
        pipeline = random_pipeline(rng, vpp=1)
        tight = replace(pipeline, limit_bytes=tuple(2 * x for x in pipeline.live_bytes))
        loose = replace(pipeline, limit_bytes=(math.inf,) * pipeline.pp)
        fast = synthesize_schedule(loose, max_evaluations=200).step_s
        assert fast <= synthesize_schedule(tight, max_evaluations=200).step_s * 1.005


def test_one_microbatch_at_a_time() -> None:
    """A limit that holds one microbatch still yields a table that ends."""
    pipeline = Pipeline(
        stage_to_pp_rank=loop_placement(3, 2),
        num_microbatches=4,
        times=JobSeconds.equal(6),
        live_bytes=(1.0,) * 6,
        limit_bytes=(2.0,) * 3,
    )
    made = synthesize_schedule(pipeline)
    validate_schedule(made.schedule, in_flight_limit=(2, 2, 2))


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"pp rank 1 may hold 1 bytes .* one takes 3 on its"):
        Pipeline(
            stage_to_pp_rank=(0, 1),
            num_microbatches=4,
            times=JobSeconds.equal(2),
            live_bytes=(1.0, 3.0),
            limit_bytes=(4.0, 1.0),
        )


def test_same_input_same_table() -> None:
    pipeline = random_pipeline(random.Random(3), vpp=2)
    assert synthesize_schedule(pipeline) == synthesize_schedule(pipeline)
