"""N11: Communication goes on while jobs compute: exposed is what the simulator says, no more.

P15, G13, D18, G18 (recomputation), and what ZB-H1 gains where links are slow. Jobs sleep, so
the machine's own speed does not matter; links hold messages back (`slow_links`).
Tests that hold seconds against a prediction are slow tests: they need a machine of their own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import pytest

import planner
from benchmarks.runtime.delays import BLOCKING, Case, Row, measure_rows
from costmodel import CostCache, estimate
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.timeline import load_timeline
from profiles import load_profile
from tests.runtime.scenarios import build, capture
from tests.runtime.slow_links import send_when_posted, sleep_in_jobs, slow_down_links
from tests.spawn import run_ranks

JOB_S, TRANSFER_S = 0.03, 0.03
LONG_TRANSFER_S = 0.3
"""Longer than a busy machine takes for a recomputation."""
SCHEDULES = ["1f1b", BLOCKING, "eager_1f1b", "zb_h1"]
AHEAD_MICROBATCHES = 4


class Ran(NamedTuple):
    """The schedules' rows, a folder of timelines, and a step's seconds by `receive_ahead`."""

    rows: list[Row]
    folder: Path
    ahead_s: dict[int, float]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Ran:
    """All runs, in one group of two ranks."""
    folder = tmp_path_factory.mktemp("timelines")
    cases = [Case(schedule=name, transfer_s=TRANSFER_S) for name in SCHEDULES]
    plans = [
        default_plan(capture("gpt"), pp=2, num_microbatches=4, schedule=name, recompute="full")
        for name in ("1f1b", "zb_h1")
    ]
    (rows, ahead_s), _ = run_ranks(_run, 2, cases, plans, folder)
    return Ran(rows, folder, ahead_s)


def _run(cases: list[Case], plans: list[Plan], folder: Path) -> tuple[list[Row], dict[int, float]]:
    rows = measure_rows(cases, ranks=2, num_microbatches=6, job_s=JOB_S, steps=2)
    for plan in plans:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PLANNER_TIMELINE", str(folder / plan.schedule))
            tiny, module = build("gpt")
            engine = planner.apply(plan, module)
        slow_down_links(engine, LONG_TRANSFER_S)
        engine.step(tiny.batch(plan.global_batch))
    return rows, {ahead: _step_when_posted(ahead) for ahead in (0, 2)}


def _step_when_posted(receive_ahead: int) -> float:
    """Seconds of a step whose messages set out when their buffers are posted."""
    plan = default_plan(capture("gpt"), pp=2, num_microbatches=AHEAD_MICROBATCHES)
    tiny, module = build("gpt")
    engine = planner.apply(plan.model_copy(update={"receive_ahead": receive_ahead}), module)
    sleep_in_jobs(engine, JOB_S)
    send_when_posted(engine, TRANSFER_S)
    start_s = time.perf_counter()
    engine.step(tiny.batch(plan.global_batch))
    return time.perf_counter() - start_s


@pytest.fixture(scope="module")
def rows(ran) -> dict[str, Row]:
    """Six microbatches, by schedule."""
    return {row.schedule: row for row in ran.rows}


@pytest.mark.slow
def test_steps_take_what_the_simulator_says(rows):
    """D18: the step, and the idle part of it, which is bubble and exposed communication."""
    for row in rows.values():
        assert row.predicted_s < row.measured_s < 1.2 * row.predicted_s, row
        assert row.measured_idle == pytest.approx(row.predicted_idle, abs=0.08), row


@pytest.mark.slow
def test_messages_travel_while_jobs_run(rows):
    """G13, P15: where the table leaves room, a transfer as long as a job costs nearly nothing;
    where a sender waits for it, it costs its time.
    """
    hidden, exposed = rows["eager_1f1b"], rows[BLOCKING]
    busy_s = (1 - hidden.predicted_idle) * hidden.predicted_s
    # Filling and draining the pipeline shows two transfers; the twenty in between are hidden.
    assert hidden.predicted_s == pytest.approx(busy_s + 3 * JOB_S + 2 * TRANSFER_S)
    assert hidden.measured_s < exposed.measured_s - 2 * TRANSFER_S


@pytest.mark.slow
def test_receives_posted_ahead_hide_the_way(ran):
    """P15: a message that sets out when its buffer is posted is waited for by each job that needs
    one, unless the buffer was posted jobs before. The first of a step has nothing to hide behind;
    half a transfer is for the clock of a busy machine.
    """
    hidden_s = ran.ahead_s[0] - ran.ahead_s[2]
    assert hidden_s > (AHEAD_MICROBATCHES - 1.5) * TRANSFER_S


def test_receives_posted_ahead_are_in_the_memory_model():
    """P15: overlap costs a buffer for each message on its way, as far ahead as the plan says."""
    graph = capture("gpt")
    costs = CostCache(graph, load_profile("h100-sxm5-80gb"))
    plan = default_plan(graph, pp=2, num_microbatches=6)
    plans = [plan.model_copy(update={"receive_ahead": ahead}) for ahead in (0, 1, 2, 3)]
    held = [
        float(estimate(graph, costs.profile, p, costs=costs).memory[1].communication_bytes)
        for p in plans
    ]
    boundary_bytes = 16 * 32 * 4  # one sample's [sequence, hidden] in fp32
    # On the last rank every second job needs a message: a forward's. And on a GPU what was received
    # is held until receives posted behind it have come (`costmodel.memory.exact.rank_walk`).
    posted, kept = (0, 1, 1, 2), (0, 1, 2, 3)
    assert held == [(p + k) * boundary_bytes for p, k in zip(posted, kept, strict=True)]


@pytest.mark.slow
def test_zero_bubble_gains_what_is_predicted(rows):
    """ZB-H1 over 1F1B: weight gradients fill the time in which gradients travel."""
    row = rows["zb_h1"]
    assert row.predicted_gain > 0.08
    assert row.measured_gain == pytest.approx(row.predicted_gain, abs=0.07)


@pytest.mark.parametrize(("schedule", "backward"), [("1f1b", "B"), ("zb_h1", "I")])
def test_recomputation_does_not_wait_for_its_gradient(ran, schedule, backward):
    """G18: on the rank that waits for gradients, each backward has a recomputation of its own,
    which is over before the gradient is there. (That the gradients stay right: `test_recompute`.)
    """
    first, last = load_timeline(ran.folder / schedule)
    spans = [s for s in first.spans if s.kind in ("R", "WAIT", backward)]
    assert [s.kind for s in spans] == ["R", "WAIT", backward] * 4
    assert [s.name for s in spans if s.kind == "R"] == [f"R0.{m}" for m in range(4)]
    recomputed, waited = spans[0], spans[1]
    assert recomputed.end_s <= waited.start_s
    assert waited.end_s > waited.start_s + LONG_TRANSFER_S / 10
    # The rank of the loss has no gradient to wait for.
    assert not [s for s in last.spans if s.kind == "R"]
