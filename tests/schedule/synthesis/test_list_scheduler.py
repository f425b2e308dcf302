"""Greedy tables: what the rule prefers, what a gap is filled with, what memory forbids."""

from __future__ import annotations

import pytest

from planner.language.schedule.jobs import Schedule
from planner.language.schedule.synthesis.list_scheduler import ListScheduler, Rule
from planner.language.schedule.timing.in_flight import in_flight
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.validate import validate_schedule

RULE = {"backward_first": True, "oldest_first": False, "patience": 0.5, "split_backward": False}


def table(placed: tuple[int, ...], num_microbatches: int, limit: float, **changes) -> Schedule:
    scheduler = ListScheduler(
        stage_to_pp_rank=placed,
        num_microbatches=num_microbatches,
        times=JobSeconds.equal(len(placed)),
        live_bytes=(1.0,) * len(placed),
        limit_bytes=(limit,) * (max(placed) + 1),
        rule=Rule(**(RULE | changes)),
    )
    return scheduler.run("greedy")


def test_backwards_first_with_room_for_pp_is_1f1b():
    schedule = table((0, 1), 4, 2.0)
    assert " ".join(map(str, schedule.jobs[1])) == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert in_flight(schedule) == (2, 1)


def test_forwards_first_fills_memory():
    schedule = table((0, 1), 4, 4.0, backward_first=False)
    assert " ".join(map(str, schedule.jobs[0])).startswith("0F0 0F1 0F2 0F3")


@pytest.mark.parametrize("placed", [(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("backward_first", [False, True])
def test_the_least_memory_does_not_lock_up(placed, split, backward_first):
    """Room for one microbatch on all of a rank's stages: the banker's algorithm gets through."""
    least = len(placed) // (max(placed) + 1)
    schedule = table(placed, 5, least, split_backward=split, backward_first=backward_first)
    validate_schedule(schedule)
    assert max(in_flight(schedule)) <= least


def test_weight_gradients_fill_the_gaps():
    schedule = table((0, 1, 2), 4, 3.0, split_backward=True)
    validate_schedule(schedule)
    last = " ".join(map(str, schedule.jobs[2]))
    assert "2W" in last
    assert last.index("2F1") < last.rindex("2W")
