"""X5: a plan's prediction beside its run."""

from dataclasses import replace

import pytest

from costmodel.compare import WARM_UP_STEPS, as_rank_timelines, compare_run
from planner.errors import PlannerError
from planner.language.schedule import build_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.timeline import RankTimeline, bubbles

STEPS = 6


@pytest.fixture
def predicted():
    """Rank 0 ends its last job at 15 s, rank 1 at 13 s; an optimizer's job follows."""
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=4)
    played = simulate(schedule, JobSeconds.equal(2))
    once = (((15.0, 15.5), (15.5, 15.5)), ((13.0, 16.0), (16.0, 16.0)))
    return replace(played, step_jobs_s=once)


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
    assert [rank.bubble_fraction for rank in found] == pytest.approx([0.2, 0.2])


def test_jobs_step_and_bubble_are_compared(predicted):
    """All takes twice as long as predicted: ratios 1/2; the step is 16 s, measured 32 s.

    Rank 1's optimizer, which begins before rank 0's last job ends, makes the step.
    """
    found = compare_run(predicted, 16.0, run_of(predicted, slower=2.0, warm_up=3.0))
    *jobs, first, first_rate, second, second_rate = found.jobs
    assert [f"{job.jobs.kind} of {job.jobs.place}" for job in jobs] == [
        "F of stage 0", "B of stage 0", "F of stage 1", "B of stage 1",
    ]  # fmt: skip
    assert [job.ratio for job in (*jobs, first, second)] == pytest.approx([0.5] * 6)
    assert [job.count for job in jobs] == [4 * (STEPS - WARM_UP_STEPS)] * 4
    assert [f"{job.jobs.kind} of {job.jobs.place}" for job in (first, second)] == [
        "O of pp rank 0", "O of pp rank 1",
    ]  # fmt: skip
    assert (first.measured_s, second.measured_s) == pytest.approx((1.0, 6.0))
    assert {job.jobs.kind for job in (first_rate, second_rate)} == {"L"}
    assert first.count == STEPS - WARM_UP_STEPS
    assert found.predicted_step_s == 16.0
    assert found.measured_step_s == pytest.approx(32.0)
    assert found.predicted_bubble_fraction == pytest.approx(0.2)
    assert found.measured_bubble_fraction == pytest.approx(0.2)
    assert found.num_steps == STEPS - WARM_UP_STEPS


def without(lines, kind: str) -> list[RankTimeline]:
    return [replace(line, spans=tuple(s for s in line.spans if s.kind != kind)) for line in lines]


def test_learning_rate_jobs_are_not_in_every_run(predicted):
    """A plan does not say whether there is a scheduler; there always is an optimizer."""
    lines = run_of(predicted, slower=1.0)
    found = compare_run(predicted, 16.0, without(lines, "L"))
    assert [job.jobs.kind for job in found.jobs] == ["F", "B", "F", "B", "O", "O"]
    with pytest.raises(PlannerError, match="job O of pp rank 0 is only in the plan"):
        compare_run(predicted, 16.0, without(lines, "O"))


def test_a_run_of_another_plan_is_refused(predicted):
    schedule = build_schedule("zb_h1", pp=2, vpp=1, num_microbatches=4)
    other = simulate(schedule, JobSeconds.equal(2))
    with pytest.raises(PlannerError, match="is only in the"):
        compare_run(predicted, 15.0, run_of(other, slower=1.0))


def test_a_run_that_was_cut_short_is_refused(predicted):
    lines = run_of(predicted, slower=1.0)
    cut = (lines[0], replace(lines[1], spans=()))
    with pytest.raises(PlannerError, match="of stage 1 is only in the plan"):
        compare_run(predicted, 15.0, cut)
