"""Interleaved stages: a bound by hand, and microbatches in flight."""

from __future__ import annotations

import numpy as np
import pytest

from planner.language.layout.axes import Degrees
from search.partition.interleaved import StageSeconds, least_end_s
from search.space.configuration import Configuration
from search.space.job_tables import in_flight_of, live_stages_of
from search.space.request_checks import divisors, listed


def configuration(schedule: str, *, pp: int, vpp: int, num_microbatches: int) -> Configuration:
    return Configuration(
        degrees=Degrees(), pp=pp, vpp=vpp, microbatch_size=1,
        num_microbatches=num_microbatches, schedule=schedule, zero=0, recompute="none",
    )  # fmt: skip


def seconds(num_stages: int, *, ahead: float = 0.0, tail: float = 0.0) -> StageSeconds:
    each = np.ones(num_stages)
    return StageSeconds(
        forward_s=each, backward_s=2 * each, ahead_s=ahead * each,
        transfer_s=np.zeros(1), back_transfer_s=np.zeros(1), tail_s=np.full(2, tail),
    )  # fmt: skip


def test_a_step_of_two_ranks_by_hand():
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1; forward 1 s, backward 2 s, 4 microbatches."""
    homes = np.array([0, 1, 0, 1])
    some = configuration("interleaved_1f1b", pp=2, vpp=2, num_microbatches=4)
    # Rank 1: 1 s until stage 0's forward is done, 4 * 2 * 3 s of work, 2 s of stage 0's backward.
    assert least_end_s(some, homes, seconds(4)) == 27.0
    # With 1 s sent ahead: rank 1 stops 1 s earlier, stage 0's input gradient takes 1 s, then its
    # own rest of 1 s; rank 0 alone would end at 24 s.
    assert least_end_s(some, homes, seconds(4, ahead=1.0)) == 26.0
    assert least_end_s(some, homes, seconds(4, tail=0.5)) == 27.5


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", (4, 3, 2, 1)), ("fthenb", (8, 8, 8, 8))]
)
def test_microbatches_in_flight(schedule, expected):
    some = configuration(schedule, pp=4, vpp=1, num_microbatches=8)
    assert in_flight_of(some) == expected
    assert live_stages_of(some) == expected


def test_numbers_for_messages():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert listed([1, 2]) == "1, 2"
    assert listed(range(20)).endswith("14, 15, ...")
