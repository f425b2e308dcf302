"""A user's own schedule, data in and out, and imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import ScheduleError
from planner.language.schedule import (
    Job,
    JobKind,
    Schedule,
    build_schedule,
    forward,
    full_backward,
    register_schedule,
)
from planner.language.schedule.draw import draw_schedule, draw_table
from planner.language.schedule.placements import fold_placement
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.communication import (
    communication_order,
    validate_communication,
)
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.language.schedule.validate import validate_schedule


@pytest.fixture
def pairs() -> Iterator[str]:
    """A user's schedule in a few lines: two microbatches forward, then both backward."""

    @register_schedule("pairs", summary="two by two", placement=fold_placement, max_vpp=None)
    def pairs(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
        placed = fold_placement(pp, vpp)
        table: list[list[Job]] = [[] for _ in range(pp)]
        for first in range(0, num_microbatches, 2):
            two = range(first, min(first + 2, num_microbatches))
            for stage, rank in enumerate(placed):
                table[rank] += [forward(stage, i) for i in two]
            for stage in reversed(range(pp * vpp)):
                table[placed[stage]] += [full_backward(stage, i) for i in two]
        return table

    yield "pairs"
    del SCHEDULES["pairs"]


def test_own_schedule_plugs_in_by_name(pairs: str) -> None:
    """P14: one function that returns a table; everything else works on it."""
    schedule = build_schedule(pairs, pp=2, vpp=2, num_microbatches=3)
    validate_schedule(schedule, in_flight_limit=(4, 4))
    validate_communication(schedule, communication_order(schedule))
    assert draw_schedule(schedule).splitlines()[1] == (
        "rank 0 | 0F0 0F1 .   .   3F0 3F1 3B0---- 3B1---- .   .   .   .   "
        "0B0---- 0B1---- 0F2 .   .   3F2 3B2---- .   .   .   .   0B2----"
    )
    with pytest.raises(ScheduleError, match="did you mean 'pairs'"):
        build_schedule("pair", pp=2, vpp=2, num_microbatches=3)


def test_job_text() -> None:
    """P11, P12: a job prints as stage, kind, microbatch; another kind is an error."""
    job = Job(kind=JobKind.BACKWARD_INPUT, stage_index=12, microbatch_index=3)
    assert str(job) == "12I3"
    assert Job.parse("12I3") == job
    for text in ("12X3", "F3", "1F", "1F-1", "1F3 ", ""):
        with pytest.raises(ScheduleError, match="is malformed; write stage, kind F, B, I or W"):
            Job.parse(text)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"name": "x", "stage_to_pp_rank": None, "num_microbatches": 1, "jobs": []},
        {"name": "x", "stage_to_pp_rank": [0], "num_microbatches": 1, "jobs": [["0F0"]]},
        {"name": "x", "stage_to_pp_rank": ["a"], "num_microbatches": 1, "jobs": ["0F0"]},
    ],
)
def test_damaged_data_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ScheduleError, match="schedule data is malformed"):
        Schedule.from_json(data)


def test_stage_times_are_checked() -> None:
    with pytest.raises(ScheduleError, match="2 F, 1 I and 2 W times given"):
        JobSeconds.of_stages(forward_s=(1, 1), backward_input_s=(1,), backward_weight_s=(1, 1))
    with pytest.raises(ScheduleError, match="must not be negative"):
        JobSeconds.equal(2, transfer_s=-1.0)
    with pytest.raises(ScheduleError, match="2 entries; 2 stages have 1 boundaries"):
        JobSeconds.equal(2, transfer_s=(1.0, 1.0))
    with pytest.raises(ScheduleError, match=r"times of 3 stages given .* of 2 stages"):
        simulate(build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2), JobSeconds.equal(3))


def test_transfer_of_each_boundary_counts() -> None:
    """One microbatch: every F and every B once, and each boundary twice."""
    schedule = build_schedule("naive", pp=3, vpp=1, num_microbatches=1)
    times = JobSeconds.equal(3, transfer_s=(0.25, 2.0))
    assert simulate(schedule, times, links="free").makespan_s == 3 * 3 + 2 * (0.25 + 2.0)


def test_a_table_that_never_ends_is_not_timed() -> None:
    text = ["0F0 0B0", "1B0 1F0"]
    data = {"name": "x", "stage_to_pp_rank": [0, 1], "num_microbatches": 1, "jobs": text}
    with pytest.raises(ScheduleError, match="never ends: pp ranks 0, 1 wait for ever"):
        simulate(Schedule.from_json(data))


def test_wide_pictures_are_cut() -> None:
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=16)
    lines = draw_schedule(schedule, max_columns=6).splitlines()
    assert lines[1] == "rank 0 | F0  F1  .   .   B0----- … 45 more columns"


def test_large_tables_are_cut_around_the_mark() -> None:
    schedule = build_schedule("1f1b", pp=16, vpp=1, num_microbatches=16)
    lines = draw_table(schedule.jobs, marked=[(8, 20)]).splitlines()
    assert lines[0] == "… 4 ranks"
    assert lines[-1] == "… 3 ranks"
    assert len(lines) == 11
    assert lines[5].startswith("rank   8 | … ")
    assert "[8B6]" in lines[5]


def test_schedules_need_no_torch() -> None:
    """The search and the cost model use tables without torch."""
    code = "import sys, planner.language.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_schedule_is_documented_and_promises_its_memory() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    for name, spec in SCHEDULES.items():
        assert f"| `{name}` |" in page
        assert spec.in_flight_limit is not None
        assert spec.summary


def test_pictures_of_very_unequal_jobs_stay_small() -> None:
    """A job a million times shorter than another does not make a million columns."""
    times = JobSeconds.of_stages(
        forward_s=(1.0, 1e-6), backward_input_s=(1.0, 1e-6), backward_weight_s=(1.0, 1e-6)
    )
    schedule = build_schedule("1f1b", pp=2, vpp=1, num_microbatches=2)
    lines = draw_schedule(schedule, times=times).splitlines()
    assert lines[1] == f"rank 0 | F0{'-' * 9} F1{'-' * 9} B0{'-' * 21} B1{'-' * 21}"
