"""Collectives of a block, along an axis each: bytes, seconds, and what of these shows.

What shows lengthens the block (`RunTimes.comm_forward_s` is its sum); the rest is hidden behind
compute. The step's timeline draws both (`costmodel.lanes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Moved(NamedTuple):
    """Collectives of one half of a block along an axis."""

    axis: str
    """The mesh axis whose ranks exchange."""
    number: int
    """How many collectives."""
    num_bytes: float
    """Bytes of the whole tensors, as collectives are priced by."""
    seconds: float
    """What they take, with nothing hidden."""
    shown_s: float
    """What of that no compute hides, and what ranks wait for the slowest of them."""

    @property
    def hidden_s(self) -> float:
        """What compute hides."""
        return max(0.0, self.seconds - self.shown_s)


class BlockMoved(NamedTuple):
    """The collectives of a block."""

    forward: tuple[Moved, ...] = ()
    """Of the forward; full recomputation runs them again."""
    backward: tuple[Moved, ...] = ()
    """Of the backward."""
    again: tuple[Moved, ...] = ()
    """Of the forward, that selective recomputation runs again in the backward."""


def shown_s(moved: Iterable[Moved]) -> float:
    """Return what shows of collectives."""
    return sum((each.shown_s for each in moved), 0.0)


def with_waits(moved: Sequence[Moved], waited_s: float, *, axis: str = "") -> tuple[Moved, ...]:
    """Return collectives with so many seconds of waiting in them, each with as many as another.

    `axis`: whose ranks wait where nothing moves.
    """
    if not waited_s:
        return tuple(moved)
    number = sum(each.number for each in moved)
    if not number:
        return (*moved, Moved(axis, 0, 0.0, waited_s, waited_s))
    each_s = waited_s / number
    return tuple(
        each._replace(
            seconds=each.seconds + each.number * each_s,
            shown_s=each.shown_s + each.number * each_s,
        )
        for each in moved
    )
