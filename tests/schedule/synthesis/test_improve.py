"""Local search: the critical path of a table, the moves worth trying on it, and what they gain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from planner.language.schedule.jobs import Job
from planner.language.schedule.registry import build_schedule
from planner.language.schedule.synthesis.improve import (
    _critical_path,
    _keeps_order,
    _moves,
    improve_schedule,
)
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate

TIMES = JobSeconds.equal(2)
SPLIT = build_schedule("zb_h1", pp=2, vpp=1, num_microbatches=4)


def test_each_job_of_the_critical_path_starts_as_the_one_before_ends():
    timeline = simulate(SPLIT, TIMES)
    path = _critical_path(timeline)
    times = [(timeline.start_s[r][p], timeline.end_s[r][p]) for r, p in path]
    assert times[0][0] == 0
    assert times[-1][1] == max(row[-1] for row in timeline.end_s)
    assert all(end == start for (_, end), (start, _) in pairwise(times))


def test_moves_keep_microbatches_and_their_jobs_in_order():
    row = [Job.parse(text) for text in ["0F0", "0F1", "0I0", "0W0", "0I1"]]
    assert not _keeps_order(row, 1, 0)  # F1 before F0: microbatches are alike, nothing is gained
    assert not _keeps_order(row, 3, 2)  # W0 before I0
    assert _keeps_order(row, 4, 3)  # I1 before W0
    path = _critical_path(simulate(SPLIT, TIMES))
    assert all(_keeps_order(SPLIT.jobs[r], s, t) for r, s, t in _moves(SPLIT, path))


def test_a_weight_gradient_in_the_way_is_moved_into_the_gap():
    """Rank 0 waits for the input gradients of rank 1, which runs each W before the next I."""
    slow = replace(
        SPLIT,
        jobs=tuple(
            tuple(map(Job.parse, row.split()))
            for row in (
                "0F0 0F1 0I0 0W0 0I1 0W1",
                "1F0 1I0 1W0 1F1 1I1 1W1",
            )
        ),
        num_microbatches=2,
    )
    before = simulate(slow, TIMES, links="free").makespan_s
    found = improve_schedule(slow, TIMES, fits=lambda row: True, max_evaluations=200)
    assert simulate(found, TIMES, links="free").makespan_s < before
    again = improve_schedule(slow, TIMES, fits=lambda row: True, max_evaluations=200)
    assert found == again
    held = improve_schedule(slow, TIMES, fits=lambda row: False, max_evaluations=20)
    assert held == slow
