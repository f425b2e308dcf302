"""A time limit that holds for all that runs inside it, however deep.

Long loops call `check_time` where they can be left without harm: nothing that is remembered is half
made there. The limit of an outer `within` is never passed by an inner one.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

GRACE = 0.025
"""What is under way when the time is up goes on for this part of the limit: it often ends with a
plan, or with a bound. A command has work of its own after that: a tenth of the limit is for all."""

INTERRUPT_GRACE_S = 2.0
"""After an interrupt it goes on for so many seconds."""

Clock = Callable[[], float]


class OutOfTime(Exception):
    """The time limit and its grace have passed; whoever set the limit says what is left undone.

    No PlannerError: a search takes those for properties of the plan that it looks at.
    """


@dataclass(slots=True)
class _Interrupt:
    """When the user interrupted; mutable, as a limit and those inside it end by one interrupt."""

    at_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deadline:
    limit_soft_s: float
    limit_hard_s: float
    clock: Clock
    interrupt: _Interrupt

    @property
    def soft_s(self) -> float:
        return min(self.limit_soft_s, self.interrupt.at_s)

    @property
    def hard_s(self) -> float:
        return min(self.limit_hard_s, self.interrupt.at_s + INTERRUPT_GRACE_S)


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
        soft_s, hard_s = min(soft_s, outer.limit_soft_s), min(hard_s, outer.limit_hard_s)
    interrupt = _Interrupt() if outer is None else outer.interrupt
    token = _CURRENT.set(
        _Deadline(limit_soft_s=soft_s, limit_hard_s=hard_s, clock=clock, interrupt=interrupt)
    )
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def ends_on_interrupt(tell: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C inside be a limit that passes then, and call `tell`.

    The second is an interrupt as outside. For the main thread, outside of any `within`.
    """
    interrupt, given = _Interrupt(), signal.getsignal(signal.SIGINT)

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, given)
        interrupt.at_s = time.perf_counter()
        tell()

    never = _Deadline(
        limit_soft_s=math.inf, limit_hard_s=math.inf, clock=time.perf_counter, interrupt=interrupt
    )
    token = _CURRENT.set(never)
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, given)
        _CURRENT.reset(token)


def is_interrupted() -> bool:
    """Whether it was an interrupt that ended the time."""
    deadline = _CURRENT.get()
    return deadline is not None and deadline.interrupt.at_s < math.inf


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
