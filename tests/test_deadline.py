"""Time limits, on clocks that tests set."""

from __future__ import annotations

import math
import signal
from itertools import count

import pytest

from planner.deadline import (
    INTERRUPT_GRACE_S,
    OutOfTime,
    check_time,
    ends_on_interrupt,
    is_interrupted,
    is_late,
    left_s,
    within,
)
from planner.language.schedule import build_schedule


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_time_never_passes():
    with within(None):
        check_time()
        assert not is_late()
        assert left_s() == math.inf


def test_what_is_late_may_go_on_for_a_fortieth_of_the_limit():
    clock = Clock()
    with within(20.0, clock=clock):
        clock.now = 19.9
        assert not is_late()
        clock.now = 20.0
        assert is_late()
        check_time()
        clock.now = 20.4
        check_time()
        assert left_s() == pytest.approx(0.1)
        clock.now = 20.5
        with pytest.raises(OutOfTime):
            check_time()
    check_time()


def test_an_inner_limit_ends_no_later_than_the_outer_one():
    clock = Clock()
    with within(20.0, clock=clock):
        clock.now = 10.0
        with within(5.0):
            assert left_s() == pytest.approx(5.125)
        with within(100.0):
            assert left_s() == pytest.approx(10.5)
            clock.now = 21.0
            with pytest.raises(OutOfTime):
                check_time()


def test_an_interrupt_is_a_limit_that_passes_and_the_second_is_an_interrupt():
    """P: limits inside end with it, and those that begin afterwards; outside nothing is left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a launcher's may be left
    told: list[int] = []
    with ends_on_interrupt(lambda: told.append(1)):
        with within(None):
            assert left_s() == math.inf
        with within(100.0):
            assert not is_late()
            signal.raise_signal(signal.SIGINT)
            assert is_late()
            assert is_interrupted()
            assert told == [1]
            assert left_s() <= INTERRUPT_GRACE_S
            check_time()
        with within(100.0):
            assert is_late()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert not is_late()
    assert not is_interrupted()
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
def test_a_table_of_thousands_of_jobs_looks_at_the_clock_while_it_is_built(schedule):
    """N6: one of 512 ranks takes seconds."""
    with within(100, clock=count().__next__), pytest.raises(OutOfTime):
        build_schedule(schedule, pp=16, vpp=2, num_microbatches=64)
