"""M17: memory walked without repetitions is that of the whole table, to the byte."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel import estimate
from planner.language.lowering.defaults import default_plan
from planner.language.schedule.timing.job_table import JobTable
from planner.language.schedule.timing.steady import SteadySchedule
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

SCHEDULES = [
    ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_v", 2),
    ("dualpipe_v", 2), ("eager_1f1b", 1), ("fthenb", 1),
]  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_not_a_byte_of_any_part_differs(name, zero, monkeypatch):
    """For any schedule, recompute, skips between stages, and however far receives are ahead."""
    model = tiny_models()[name]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    rng = np.random.default_rng(zero)
    plans = []
    for schedule, vpp in SCHEDULES:
        if len(graph.blocks) < 2 * vpp:
            continue
        plan = default_plan(
            graph, dp=2, pp=2, vpp=vpp, schedule=schedule, num_microbatches=60, zero_stage=zero,
            recompute=rng.choice(["none", "selective", "full"]),
        )  # fmt: skip
        last = tuple(
            stage.model_copy(update={"recompute_last": bool(rng.integers(2))})
            for stage in plan.stages
        )
        ahead = int(rng.integers(0, 4))
        plans.append(plan.model_copy(update={"stages": last, "receive_ahead": ahead}))
    assert len(plans) > 5
    left_out = []
    steady = JobTable.steady

    def counted(table: JobTable, *, ahead: int) -> SteadySchedule:
        found = steady(table, ahead=ahead)
        left_out.append(found.left_out)
        return found

    monkeypatch.setattr(JobTable, "steady", counted)
    short = [estimate(graph, Machine(), plan).memory for plan in plans]
    assert sum(count > 30 for count in left_out) >= len(plans) - 1  # all but fthenb
    monkeypatch.setattr(
        JobTable, "steady", lambda table, *, ahead: SteadySchedule.whole(table.schedule)
    )
    whole = [estimate(graph, Machine(), plan).memory for plan in plans]
    assert short == whole
