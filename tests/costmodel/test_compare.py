"""X5: a plan's prediction beside its run."""

from dataclasses import replace

import pytest

from costmodel.compare import WARM_UP_STEPS, as_rank_timelines, compare_run
from costmodel.time.simulate import JobSeconds, simulate
from planner.errors import PlannerError
from planner.schedule import build_schedule
from planner.timeline import RankTimeline, bubbles

STEPS = 6


@pytest.fixture
def predicted():
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=4)
    return simulate(schedule, JobSeconds.equal(2, forward_s=1.0, backward_s=2.0))


def run_of(timeline, *, slower: float, warm_up: float = 1.0) -> tuple[RankTimeline, ...]:
    """A recording in which all takes `slower` times as long, warm-up steps even longer.

    Rank 1's clock is 5 s behind.
    """
    lines = []
    for line in as_rank_timelines(timeline):
        behind_s = 5.0 * line.rank
        spans = []
        for step in range(STEPS):
            scale = slower * (warm_up if step < WARM_UP_STEPS else 1.0)
            spans += [
                replace(
                    span,
                    step=step,
                    start_s=1000 * step + scale * span.start_s - behind_s,
                    end_s=1000 * step + scale * span.end_s - behind_s,
                )
                for span in line.spans
            ]
        lines.append(replace(line, spans=tuple(spans), clock_offset_s=behind_s))
    return tuple(lines)


def test_a_simulated_timeline_reads_like_a_recorded_one(predicted):
    """Bubble of 1F1B with equal stages: (pp-1)/(m+pp-1) = 1/5 on each rank."""
    found = bubbles(as_rank_timelines(predicted))
    assert [one.bubble_fraction for one in found] == pytest.approx([0.2, 0.2])


def test_jobs_step_and_bubble_are_compared(predicted):
    """All takes twice as long as predicted: ratios 1/2; the step is (4+1) * 3 s, measured 30 s."""
    found = compare_run(predicted, 15.0, run_of(predicted, slower=2.0, warm_up=3.0))
    assert [(job.stage, job.kind) for job in found.jobs] == [(0, "F"), (0, "B"), (1, "F"), (1, "B")]
    assert [job.ratio for job in found.jobs] == pytest.approx([0.5] * 4)
    assert [job.count for job in found.jobs] == [4 * (STEPS - WARM_UP_STEPS)] * 4
    assert found.predicted_step_s == 15.0
    assert found.measured_step_s == pytest.approx(30.0)
    assert found.predicted_bubble_fraction == pytest.approx(0.2)
    assert found.measured_bubble_fraction == pytest.approx(0.2)
    assert found.num_steps == STEPS - WARM_UP_STEPS


def test_a_run_of_another_plan_is_refused(predicted):
    schedule = build_schedule("zb_h1", pp=2, vpp=1, num_microbatches=4)
    other = simulate(schedule, JobSeconds.equal(2, forward_s=1.0, backward_s=2.0))
    with pytest.raises(PlannerError, match="is only in the"):
        compare_run(predicted, 15.0, run_of(other, slower=1.0))


def test_a_run_that_was_cut_short_is_refused(predicted):
    lines = run_of(predicted, slower=1.0)
    cut = (lines[0], replace(lines[1], spans=()))
    with pytest.raises(PlannerError, match="of stage 1 is only in the plan"):
        compare_run(predicted, 15.0, cut)
