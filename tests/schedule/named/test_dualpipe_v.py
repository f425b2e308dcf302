"""DualPipe-V: both chunks of a V, also of fewer microbatches than its fill is written for."""

from __future__ import annotations

import pytest

from planner.language.schedule.jobs import JobKind, Schedule
from planner.language.schedule.named.dualpipe_v import dualpipe_v
from planner.language.schedule.placements import fold_placement
from planner.language.schedule.timing.in_flight import in_flight
from planner.language.schedule.validate import validate_schedule


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_every_job_once_and_no_more_in_flight_than_stated(pp, num_microbatches):
    rows = dualpipe_v(pp, 2, num_microbatches)
    schedule = Schedule(
        name="table",
        stage_to_pp_rank=fold_placement(pp, 2),
        num_microbatches=num_microbatches,
        jobs=tuple(map(tuple, rows)),
    )
    validate_schedule(schedule)
    assert max(in_flight(schedule)) == min(2 * num_microbatches, 2 * pp + 1)


def test_steady_jobs_of_both_chunks_stand_in_pairs():
    """Of 2 ranks and 8 microbatches: F of a chunk, then B of the other, whose sends overlap."""
    row = dualpipe_v(2, 2, 8)[0]
    texts = [f"{job.kind}{int(job.stage_index > 1)}" for job in row]
    assert " ".join(texts).count("F0 B1 F1 B0") == 8 - 4 + 1
    assert JobKind.BACKWARD_WEIGHT in {job.kind for job in row[-4:]}
