"""Schedules with virtual stages: placement, golden tables, memory and sends."""

from __future__ import annotations

import pytest

from planner.errors import ScheduleError
from planner.language.schedule import Schedule, build_schedule
from planner.language.schedule.named.interleaved import group_sizes
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.schedule.registry import stage_to_pp_rank
from planner.language.schedule.timing.communication import communication_order
from planner.language.schedule.timing.in_flight import in_flight
from planner.language.schedule.timing.simulate import simulate
from planner.language.schedule.validate import validate_schedule


def build(name: str, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    return build_schedule(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.jobs]


def test_round_robin_layers() -> None:
    """V2: 16 layers, 4 ranks, 2 layers in a virtual stage: rank 0 holds 0-1 and 8-9."""
    placed = stage_to_pp_rank("interleaved_1f1b", 4, 2)
    layers = [layer for layer in range(16) if placed[layer // 2] == 0]
    assert layers == [0, 1, 8, 9]


def test_fold_runs_every_second_chunk_in_reverse() -> None:
    """V10: the first half forward, the second reversed."""
    assert fold_placement(4, 2) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert fold_placement(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)


def test_golden_interleaved_1f1b() -> None:
    """V6: interleaving from two ranks up."""
    assert rows(build("interleaved_1f1b", 2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_golden_interleaved_1f1b_of_a_number_that_pp_does_not_divide() -> None:
    """V4: m=3, pp=2 makes one group of three, with the bubble of the published table."""
    schedule = build("interleaved_1f1b", 2, 2, 3)
    assert rows(schedule) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]
    assert simulate(schedule).makespan_s == 3 * 2 * 3 + (2 - 1) * 3


def test_groups_hold_at_least_pp_microbatches() -> None:
    assert group_sizes(4, 8) == [4, 4]
    assert group_sizes(4, 6) == [6]
    assert group_sizes(4, 15) == [5, 5, 5]
    assert group_sizes(4, 13) == [5, 4, 4]


def test_golden_looped_breadth_first() -> None:
    """V10: all microbatches in before the next chunk, all out the same way."""
    assert rows(build("looped_breadth_first", 2, 2, 3)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ]


def test_golden_interleaved_fthenb() -> None:
    """V5: the groups of interleaved 1F1B, all forwards first; all stages are live."""
    schedule = build("interleaved_fthenb", 2, 2, 4)
    assert rows(schedule) == [
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 3B0 3B1 1B0 1B1 3B2 3B3 1B2 1B3",
    ]
    assert in_flight(schedule) == (8, 8)


def test_golden_folds() -> None:
    """V10: all-in-all-out and first-in-first-out on the folded map."""
    assert rows(build("fold_all_in_all_out", 2, 2, 2)) == [
        "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",
        "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1",
    ]
    assert rows(build("fold_first_in_first_out", 2, 2, 4)) == [
        "0F0 0F1 0F2 3F0 3B0 3F1 3B1 0F3 0B0 0B1 3F2 3B2 3F3 3B3 0B2 0B3",
        "1F0 2F0 1F1 2F1 1F2 2B0 1B0 2B1 1B1 2F2 1F3 2F3 2B2 1B2 2B3 1B3",
    ]


def test_first_in_first_out_needs_little_memory() -> None:
    """V10: far from all stages of all microbatches are live, with no limit set."""
    schedule = build("fold_first_in_first_out", 4, 2, 32)
    assert (
        max(in_flight(schedule)) <= 4 * 4 < max(in_flight(build("fold_all_in_all_out", 4, 2, 32)))
    )


@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_interleaving_divides_the_bubble_and_multiplies_the_sends(pp: int, vpp: int) -> None:
    """V3: with stages of 1/vpp the size, bubble 1/vpp; sends of vpp * pp - 1 edges."""
    m = 2 * pp
    plain = build("1f1b", pp, 1, m)
    looped = build("interleaved_1f1b", pp, vpp, m)
    plain_bubble = simulate(plain).bubble_s
    looped_bubble = simulate(looped).bubble_s
    assert [b / vpp for b in looped_bubble] == pytest.approx([b / vpp for b in plain_bubble])
    assert looped_bubble[0] / (looped_bubble[0] + 3 * vpp * m) < plain_bubble[0] / (
        plain_bubble[0] + 3 * m
    )

    def num_sends(schedule: Schedule) -> int:
        return sum(map(len, communication_order(schedule))) // 2

    assert num_sends(plain) == 2 * m * (pp - 1)
    assert num_sends(looped) == 2 * m * (vpp * pp - 1)
    folded = build("fold_all_in_all_out", pp, vpp, m)
    assert num_sends(folded) == 2 * m * vpp * (pp - 1)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "fold_all_in_all_out", "zb_v"])
def test_virtual_schedules_need_virtual_stages(name: str) -> None:
    with pytest.raises(ScheduleError, match="needs vpp>=2, vpp=1 given"):
        build(name, 2, 1, 4)


def test_a_v_has_two_chunks() -> None:
    with pytest.raises(ScheduleError, match="'zb_v' takes vpp<=2, vpp=3 given"):
        build("zb_v", 2, 3, 4)


def test_large_tables_take_seconds() -> None:
    """64 ranks x 8 chunks x 512 microbatches: half a million jobs built and checked."""
    schedule = build("interleaved_1f1b", 64, 8, 512)
    validate_schedule(schedule)
    assert sum(map(len, schedule.jobs)) == 64 * 8 * 512 * 2
