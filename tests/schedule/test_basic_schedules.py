"""Golden tables and errors of the schedules without virtual stages."""

from __future__ import annotations

import pytest

from planner.errors import ScheduleError
from planner.language.schedule import Schedule, build_schedule, register_schedule
from planner.language.schedule.draw import draw_schedule
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.communication import (
    communication_order,
    validate_communication,
)
from planner.language.schedule.timing.in_flight import in_flight, in_flight_per_stage
from planner.language.schedule.timing.simulate import simulate
from planner.language.schedule.validate import validate_schedule


def build(name: str, pp: int, num_microbatches: int) -> Schedule:
    return build_schedule(name, pp=pp, vpp=1, num_microbatches=num_microbatches)


def rows(schedule: Schedule) -> list[str]:
    """The table without stages, for a rank holds one: ``F0 F1 B0`` …"""
    return [" ".join(f"{j.kind}{j.microbatch_index}" for j in row) for row in schedule.jobs]


def test_golden_fthenb_pp4_m8() -> None:
    """P6: all forwards, then all backwards; every rank holds all 8 microbatches."""
    schedule = build("fthenb", 4, 8)
    row = "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"
    assert rows(schedule) == [row] * 4
    assert in_flight(schedule) == (8, 8, 8, 8)


def test_golden_1f1b_pp4_m8() -> None:
    """P7: warm-up of pp - rank forwards, pairs, drain; rank s holds min(m, pp - s)."""
    schedule = build("1f1b", 4, 8)
    assert rows(schedule) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert in_flight(schedule) == (4, 3, 2, 1)
    assert in_flight_per_stage(schedule) == (4, 3, 2, 1)


def test_golden_eager_1f1b_pp4_m8() -> None:
    """P9: more live microbatches than 1F1B, never more than FThenB."""
    schedule = build("eager_1f1b", 4, 8)
    assert rows(schedule) == [
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert in_flight(schedule) == (7, 5, 3, 1)


def test_golden_naive() -> None:
    """P3: one microbatch at a time."""
    assert rows(build("naive", 3, 2)) == ["F0 B0 F1 B1"] * 3


def test_picture_of_1f1b() -> None:
    """G17: at each clock the jobs run on the anti-diagonal of microbatch and rank."""
    assert draw_schedule(build("1f1b", 3, 4)).splitlines() == [
        "1f1b: pp=3, 3 stages, 4 microbatches, 18 columns, bubble 33.3%",
        "rank 0 | F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---",
        "rank 1 | .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .",
        "rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .",
    ]


@pytest.mark.parametrize("name", ["naive", "fthenb", "1f1b", "eager_1f1b"])
def test_json_round_trip(name: str) -> None:
    """P12: a table survives JSON and back."""
    schedule = build(name, 3, 5)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_unknown_name_lists_valid_ones_and_the_nearest() -> None:
    """P10: the error helps to choose."""
    with pytest.raises(ScheduleError, match=r"'1F-1B' is unknown; did you mean '1f1b'\?.*fthenb"):
        build("1F-1B", 2, 4)


def test_fewer_microbatches_than_ranks_is_refused() -> None:
    """P8: both numbers are named."""
    with pytest.raises(ScheduleError, match="num_microbatches=3 is fewer than pp=4"):
        build("1f1b", 4, 3)


def test_virtual_stages_are_refused_where_there_are_none() -> None:
    with pytest.raises(ScheduleError, match="'1f1b' has no virtual stages, vpp=2 given"):
        build_schedule("1f1b", pp=2, vpp=2, num_microbatches=4)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ScheduleError, match="'1f1b' is registered already"):
        register_schedule("1f1b")


@pytest.mark.parametrize("name", ["naive", "fthenb", "1f1b", "eager_1f1b"])
def test_valid_for_all_sizes(name: str) -> None:
    """P6, P7, P9: legal, within the promised in-flight limit, and with safe communication."""
    for pp in range(1, 9):
        for num_microbatches in range(pp, 17):
            schedule = build(name, pp, num_microbatches)
            validate_schedule(schedule)
            limit = SCHEDULES[name].in_flight_limit
            assert limit is not None
            assert in_flight(schedule) == limit(pp, 1, num_microbatches)
            validate_communication(schedule, communication_order(schedule))


@pytest.mark.parametrize("name", ["fthenb", "1f1b", "eager_1f1b"])
def test_bubble_of_equal_stages(name: str) -> None:
    """P4: bubble_fraction = (pp-1)/(m+pp-1)."""
    for pp in range(1, 9):
        for m in range(pp, 17):
            fraction = simulate(build(name, pp, m)).bubble_fraction
            assert fraction == pytest.approx((pp - 1) / (m + pp - 1))


def test_clock_cycles_of_forwards() -> None:
    """G17: at clock t the forwards of microbatch t - rank run, one on each rank."""
    starts: dict[int, list[tuple[int, int]]] = {}
    for rank, job, start, _ in simulate(build("fthenb", 3, 4)):
        if str(job.kind) == "F":
            starts.setdefault(round(start), []).append((job.microbatch_index, rank))
    assert starts == {
        0: [(0, 0)],
        1: [(1, 0), (0, 1)],
        2: [(2, 0), (1, 1), (0, 2)],
        3: [(3, 0), (2, 1), (1, 2)],
        4: [(3, 1), (2, 2)],
        5: [(3, 2)],
    }
