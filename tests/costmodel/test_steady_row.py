"""Rows without their repetitions: the same memory, in far fewer jobs."""

import numpy as np
import pytest

from costmodel import estimate
from costmodel.memory.exact import plan_memory
from costmodel.memory.exact.steady_row import SteadyRow, steady_row
from planner.plan.defaults import default_plan
from planner.schedule import build_schedule
from planner.schedule.jobs import JobKind
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

SCHEDULES = [
    ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_v", 2),
    ("dualpipe_v", 2), ("eager_1f1b", 1), ("fthenb", 1),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "vpp"), SCHEDULES)
def test_a_longer_pipeline_is_no_longer_to_walk(schedule, vpp):
    """M17: however many microbatches, a row has the jobs of few, each exactly once."""
    lengths = []
    for m in (96, 192):
        rows = build_schedule(schedule, pp=4, vpp=vpp, num_microbatches=m).jobs
        for row in rows:
            short = steady_row(row, ahead=2).jobs
            passes = [job for job in short if job.kind is not JobKind.BACKWARD_WEIGHT]
            assert len(passes) == 2 * vpp * (1 + max(job.microbatch_index for job in short))
            assert len(set(short)) == len(short)
            lengths.append(len(short))
    if schedule == "fthenb":  # holds every microbatch
        assert lengths[4:] == [2 * length for length in lengths[:4]]
    else:
        assert lengths[4:] == lengths[:4]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_of_the_whole_row_is_that_of_the_short_one(zero, monkeypatch):
    """M17: not a byte of any part differs, for any schedule, recompute and variant to receive."""
    model = tiny_models()["gpt"]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name="gpt"
    )
    rng = np.random.default_rng(zero)
    plans = []
    for schedule, vpp in SCHEDULES:
        plan = default_plan(
            graph, dp=2, pp=2, vpp=vpp, schedule=schedule, num_microbatches=40, zero_stage=zero,
            recompute=rng.choice(["none", "selective", "full"]),
        )  # fmt: skip
        last = tuple(
            stage.model_copy(update={"recompute_last": bool(rng.integers(2))})
            for stage in plan.stages
        )
        ahead = int(rng.integers(1, 4))
        plans.append(plan.model_copy(update={"stages": last, "receive_ahead": ahead}))
    short = [estimate(graph, Machine(), plan).memory for plan in plans]
    monkeypatch.setattr(plan_memory, "steady_row", lambda row, ahead: SteadyRow(row))
    whole = [estimate(graph, Machine(), plan).memory for plan in plans]
    assert short == whole
