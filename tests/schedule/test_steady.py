"""M17: tables without their repetitions have the jobs of few microbatches, each exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.language.schedule import build_schedule
from planner.language.schedule.jobs import JobKind
from planner.language.schedule.timing.steady import steady_schedule
from planner.language.schedule.validate import validate_schedule

SCHEDULES = [
    ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_v", 2),
    ("dualpipe_v", 2), ("eager_1f1b", 1),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "vpp"), SCHEDULES)
def test_a_longer_pipeline_is_no_longer_to_walk(schedule, vpp):
    lengths = set()
    for m in (96, 192):
        whole = build_schedule(schedule, pp=4, vpp=vpp, num_microbatches=m)
        steady = steady_schedule(whole, ahead=2)
        short = steady.schedule
        assert short.num_microbatches == m - steady.left_out
        validate_schedule(short, in_flight_limit=None)
        for row in short.jobs:
            passes = [job for job in row if job.kind is not JobKind.BACKWARD_WEIGHT]
            assert len(passes) == 2 * vpp * short.num_microbatches
            assert len(set(row)) == len(row)
        lengths.add(tuple(map(len, short.jobs)))
    assert len(lengths) == 1
    assert max(map(len, short.jobs)) < len(whole.jobs[0]) / 3


@pytest.mark.parametrize(("schedule", "vpp"), [*SCHEDULES, ("fthenb", 1)])
def test_what_is_left_is_the_row_before_and_behind_the_gap(schedule, vpp):
    whole = build_schedule(schedule, pp=4, vpp=vpp, num_microbatches=96)
    steady = steady_schedule(whole, ahead=3)
    for row, short, gap in zip(whole.jobs, steady.schedule.jobs, steady.gaps, strict=True):
        behind = len(short) - gap
        assert short[:gap] == row[:gap]
        later = [
            replace(job, microbatch_index=job.microbatch_index + steady.left_out)
            for job in short[gap:]
        ]
        assert tuple(later) == row[len(row) - behind :]


def test_few_microbatches_and_tables_without_a_middle_stay_as_they_are():
    for schedule, m in (("1f1b", 8), ("fthenb", 96)):
        whole = build_schedule(schedule, pp=4, vpp=1, num_microbatches=m)
        steady = steady_schedule(whole, ahead=2)
        assert steady.schedule is whole
        assert (steady.left_out, steady.gaps) == (0, (0, 0, 0, 0))
    # A row of its own, in which one microbatch waits to the end.
    whole = build_schedule("1f1b", pp=1, vpp=1, num_microbatches=96)
    (row,) = whole.jobs
    waits = (row[0], *row[2:], row[1])
    odd = replace(whole, jobs=(waits,))
    assert steady_schedule(odd, ahead=2).schedule is odd
