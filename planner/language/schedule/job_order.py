"""What the order of a schedule's jobs means for how long a step takes, with one stage a rank.

A microbatch that leaves rank r goes forward through the later stages and its gradient comes back:
a *round trip*. A bound of the step from below, before there is a table, needs three facts:

- which round trips a rank must wait for (`RoundTrips`): they depend on nothing but the order;
- how many forwards a rank runs before its first backward (`warmup`, stated for each stage of a
  rank): they fit into the first round trip, and as many backwards fit into the last;
- how many weight gradients a rank may leave to the end (`late_weights`), where backward is split:
  so much less is computed before the last gradient leaves for the rank before.

      1f1b, rank 0 of 3   F0 F1 F2 B0 ...     warmup 3: F1 and F2 run during the first round trip
                             ^------^

A schedule states them where it is registered. What it does not state is not used: the bound is
then that of any order of jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

PerRank = Callable[[int, int, int], tuple[int, ...]]
"""From (pp, vpp, num_microbatches) to a count for each pp rank."""
PerStage = PerRank
"""From the same to a count for each of the pp * vpp stages."""


class RoundTrips(StrEnum):
    """Which microbatches' round trips a rank waits for."""

    UNKNOWN = "unknown"
    """Nothing is stated; a rank may always have other work."""
    FIRST_AND_LAST = "first and last"
    """The first backward follows the first forward's round trip, and the last microbatch's
    backward follows its own; only warmup and cooldown jobs run meanwhile (1F1B)."""
    AFTER_LAST_FORWARD = "after last forward"
    """All forwards of every rank come before its first backward, so nothing runs during the
    round trip in between (GPipe)."""
    EVERY = "every"
    """Each microbatch is done before the next begins, so nothing ever runs beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """The facts above for given sizes: one entry a pp rank, each rank with one stage."""

    round_trips: RoundTrips = RoundTrips.UNKNOWN
    """Which round trips a rank waits for."""
    warmup: tuple[int, ...] = ()
    """Forwards before the first backward; given for `FIRST_AND_LAST`."""
    splits_backward: bool = False
    """Whether some or all backwards are I and W jobs."""
    late_weights: tuple[int, ...] = ()
    """Most W jobs after the last I job; empty: not stated, perhaps those of all microbatches."""

    @property
    def unsplit(self) -> JobOrder:
        """The same where I jobs run whole backwards, and W jobs have nothing to do."""
        return replace(self, splits_backward=False, late_weights=())
