"""A simulated timetable printed for people."""

import pytest
from rich.console import Console

from commands.render.plans.plan import LINE_WIDTH, draw_timetable
from commands.render.run import describe_run, describe_timeline
from costmodel.compare import JobComparison, JobsAlike, RunComparison
from planner.language.schedule import build_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate


def printed(parts) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(*parts)
    return capture.get()


def test_a_rank_s_waiting_is_printed_as_its_bubble():
    """1F1B of 2 ranks and 3 microbatches of 1 s + 2 s: each rank works 9 of 12 s."""
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=3)
    seconds = JobSeconds.equal(2)
    text = printed(describe_timeline(simulate(schedule, seconds), seconds))
    assert text.count("25.0%") == 1 + 2  # of the step, and of each rank
    assert "12" in text


def test_a_run_is_printed_beside_its_prediction():
    """Predicted over measured, of jobs and of the step."""
    jobs = (
        JobComparison(
            jobs=JobsAlike.of(0, 3, "F"), predicted_s=1.0, measured_s=2.0, count=3
        ),
        JobComparison(
            jobs=JobsAlike.of(1, -1, "L"), predicted_s=0.0, measured_s=0.0, count=3
        ),
    )  # fmt: skip
    comparison = RunComparison(
        jobs=jobs, predicted_step_s=3.0, measured_step_s=4.0,
        predicted_bubble_fraction=0.25, measured_bubble_fraction=0.5, num_steps=7,
    )  # fmt: skip
    text = printed(describe_run(comparison))
    for part in (
        "0.50",
        "0.75",
        "7 steps",
        "a step took 4 s, 1.33 times the 3 s predicted",
        "25.0% predicted",
        "50.0% measured",
        "stage 3",
        "pp rank 1",
    ):
        assert part in text


@pytest.mark.parametrize("width", [80, LINE_WIDTH])
def test_a_timetable_is_cut_to_the_width_of_a_line(width):
    """Of 200 microbatches the jobs that have no room are counted; of two all are drawn."""
    few, many = (
        draw_timetable(
            build_schedule("1f1b", pp=2, vpp=1, num_microbatches=count), width=width
        ).plain
        for count in (2, 200)
    )
    assert "B1" in few
    assert "B199" not in many
    assert max(map(len, many.splitlines())) <= width
