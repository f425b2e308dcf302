"""All forwards, then all backwards."""

from __future__ import annotations

from planner.language.schedule.named.fthenb import fthenb


def test_all_microbatches_are_alive_at_the_turn():
    rows = fthenb(3, 1, 4)
    assert [" ".join(map(str, row)) for row in rows][2] == "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3"
    assert len({tuple((job.kind, job.microbatch_index) for job in row) for row in rows}) == 1
