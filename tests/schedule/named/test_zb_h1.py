"""ZB-H1: the weight gradient of rank r runs r jobs behind its input gradient."""

from __future__ import annotations

import pytest

from planner.language.schedule.jobs import JobKind
from planner.language.schedule.named.zb_h1 import zb_h1


@pytest.mark.parametrize("num_microbatches", [3, 6])
def test_rank_r_keeps_w_r_behind(num_microbatches):
    for rank, row in enumerate(zb_h1(3, 1, num_microbatches)):
        inputs = [j.microbatch_index for j in row if j.kind is JobKind.BACKWARD_INPUT]
        weights = [j.microbatch_index for j in row if j.kind is JobKind.BACKWARD_WEIGHT]
        assert inputs == weights == list(range(num_microbatches))
        behind = 0
        for job in row:
            behind += (job.kind is JobKind.BACKWARD_INPUT) - (job.kind is JobKind.BACKWARD_WEIGHT)
            assert behind <= rank + 1
        first = row.index(next(j for j in row if j.kind is JobKind.BACKWARD_WEIGHT))
        assert sum(j.kind is JobKind.BACKWARD_INPUT for j in row[:first]) == rank + 1
