"""A time limit that holds for all that runs inside it, however deep.

Long loops call `check_time` where they can be left without harm: nothing that is remembered is half
made there. The limit of an outer `within` is never passed by an inner one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

GRACE = 0.05
"""What is under way when the time is up goes on for this part of the limit: it often ends with a
plan, or with a bound."""

Clock = Callable[[], float]


class OutOfTime(Exception):
    """The time limit and its grace have passed; whoever set the limit says what is left undone.

    No PlannerError: a search takes those for properties of the plan that it looks at.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deadline:
    soft_s: float
    hard_s: float
    clock: Clock


_CURRENT: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


@contextlib.contextmanager
def within(limit_s: float | None, *, clock: Clock = time.perf_counter) -> Iterator[None]:
    """Let what runs inside end in `limit_s` seconds of a clock; None sets no limit.

    An inner limit is kept by the clock of the outer one.
    """
    outer = _CURRENT.get()
    if limit_s is None:
        yield
        return
    if outer is not None:
        clock = outer.clock
    now = clock()
    soft_s, hard_s = now + limit_s, now + (1 + GRACE) * limit_s
    if outer is not None:
        soft_s, hard_s = min(soft_s, outer.soft_s), min(hard_s, outer.hard_s)
    token = _CURRENT.set(_Deadline(soft_s=soft_s, hard_s=hard_s, clock=clock))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def is_late() -> bool:
    """Whether the limit has passed: what is not begun yet should not begin."""
    deadline = _CURRENT.get()
    return deadline is not None and deadline.clock() >= deadline.soft_s


def check_time() -> None:
    """Raise OutOfTime once the limit and its grace have passed."""
    deadline = _CURRENT.get()
    if deadline is not None and deadline.clock() >= deadline.hard_s:
        raise OutOfTime


def left_s() -> float:
    """Return the seconds until `check_time` raises: for a solver that keeps its own limit."""
    deadline = _CURRENT.get()
    return math.inf if deadline is None else max(0.0, deadline.hard_s - deadline.clock())
