"""Which runs of blocks each stage of a chain may hold: starts and ends within bounds.

A stage need not be looked at anywhere: the stages before it hold at least one block each and
at most so many, and so do those after it. What is left is a `Window`.

Most models are a few blocks at each end and one block many times between (or several in turn).
There a run of blocks costs the same wherever it lies, so of the runs of a window, some n w, a few
times n or w are different: each kind is priced once (`Repetition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import gt
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]
Part = EllipsisType | tuple[slice, slice]
"""Rows and starts of a window's arrays, or all of them."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The runs that one stage may hold: starts and ends within bounds, of so many blocks.

    Arrays have a column for each start. Rows are ends, or lengths where those are fewer.
    """

    first_start: int
    last_start: int
    first_end: int
    last_end: int
    width: int

    @classmethod
    def all_runs(cls, num_blocks: int, width: int) -> Window:
        """Return every run of at most `width` blocks, by (length - 1, first block)."""
        return cls(
            first_start=0,
            last_start=num_blocks - 1,
            first_end=1,
            last_end=num_blocks,
            width=width,
        )

    @property
    def num_cells(self) -> int:
        """How many entries arrays of the window have."""
        rows = self.last_end - self.first_end + 1 if self._by_end else self.width
        return rows * (self.last_start - self.first_start + 1)

    @property
    def _by_end(self) -> bool:
        # Rows are ends where there are fewer ends than lengths, as for stages near a fixed cut.
        return self.last_end - self.first_end < self.width - 1

    @cached_property
    def start(self) -> NDArray[np.intp]:
        """First block of each column (1, columns)."""
        return np.arange(self.first_start, self.last_start + 1)[None, :]

    @cached_property
    def _wanted(self) -> NDArray[np.intp]:
        # (rows, columns) The end that each entry stands for, possible or not.
        if self._by_end:
            ends = np.arange(self.first_end, self.last_end + 1)[:, None]
            return np.broadcast_to(ends, (len(ends), self.start.shape[1]))
        return self.start + np.arange(1, self.width + 1)[:, None]

    @cached_property
    def end(self) -> NDArray[np.intp]:
        """The block after each run (rows, columns); of those that are not valid, some other."""
        # Entries that are no runs get a legal end, so that running sums can be read at all entries.
        return np.clip(self._wanted, self.start + 1, self.last_end)

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """Which entries are runs of the window."""
        length = self.end - self.start
        return (
            (self._wanted == self.end)
            & (self.end >= self.first_end)
            & (length >= 1)
            & (length <= self.width)
        )


def stage_windows(
    reach: NDArray[np.intp],
    num_stages: int,
    starts: Sequence[tuple[int, int]] | None = None,
) -> tuple[Window, ...] | None:
    """Return the runs that leave the other stages enough blocks, and not too many.

    reach[i] (n + 1, never falling) is where a stage that starts at block i ends at the latest,
    `starts` where each stage, and what comes after the last, may start at all, if that is known.
    None where no cut of so many stages is left.
    """
    n = len(reach) - 1
    starts = starts or [(0, n)] * (num_stages + 1)
    # Forward: how far the stages up to here get; backward: where those after must start to reach n.
    latest, earliest = [0], [n]
    for stage in range(num_stages):
        # Each stage after this one takes a block at least.
        most = min(n - (num_stages - stage - 1), starts[stage + 1][1])
        latest.append(min(most, int(reach[latest[-1]])))
    for stage in range(num_stages - 1, -1, -1):
        # Each stage before takes a block at least; `reach` never falls, so bisection finds the
        # first start from which a stage still gets to the earliest start of the next.
        least = max(stage, starts[stage][0])
        earliest.append(max(least, int(np.searchsorted(reach, earliest[-1], side="left"))))
    earliest.reverse()
    # Stage 0 has to start at block 0, the last stage has to end at n.
    if earliest[0] > 0 or latest[-1] < n or any(map(gt, earliest, latest)):
        return None
    return tuple(
        Window(
            first_start=earliest[s],
            last_start=latest[s],
            first_end=earliest[s + 1],
            last_end=latest[s + 1],
            # A window is a rectangle as wide as its longest run; `valid` marks what is in.
            width=int(
                (reach[earliest[s] : latest[s] + 1] - np.arange(earliest[s], latest[s] + 1)).max()
            ),
        )
        for s in range(num_stages)
    )


def even_reach(num_blocks: int, width: int) -> NDArray[np.intp]:
    """Return `reach` of stages of at most `width` blocks."""
    return np.minimum(num_blocks, np.arange(num_blocks + 1) + width)


def fixed_windows(cuts: Sequence[int]) -> tuple[Window, ...]:
    """Return the one run of each stage between given cuts."""
    return tuple(
        Window(first_start=a, last_start=a, first_end=b, last_end=b, width=b - a)
        for a, b in pairwise(cuts)
    )


_LONGEST_PERIOD = 8
"""Blocks in turn: Llama 4 and Jamba repeat four and eight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunKinds:
    """One run of each kind, from block `start` to `end` (kinds,), and which kind each of a
    window's runs is (`of`, in the window's shape).
    """

    start: Indices
    end: Indices
    of: Indices


class Repetition:
    """Where a chain repeats itself; keeps room to number runs in, so it is not frozen.

    `labels` are equal for blocks that are alike.
    """

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self._width = len(labels) + 1
        self.part = self.first, self.last, self.period = _longest_repetition(labels)
        self._is_used = np.zeros(self._width**2, dtype=bool)
        self._number = np.zeros(self._width**2, dtype=np.intp)

    def kinds(self, window: Window) -> RunKinds:
        """Return the kinds of a window's runs: those within the repetition are moved to its
        beginning by whole periods.
        """
        start, end = np.broadcast_arrays(window.start, window.end)
        moved = (window.start - self.first) // self.period * self.period
        # A run that sticks out of the repetition has other neighbours: it is a kind of its own.
        moved = moved * ((start >= self.first) & (end <= self.last))
        # Numbers the kinds that occur without a sort: a flag for each (start, end) there may be.
        code = (start - moved) * self._width + end - moved
        self._is_used[code] = True
        used = np.flatnonzero(self._is_used)
        # Only the flags that were set are cleared: a window uses few of all (n + 1) ** 2.
        self._is_used[used] = False
        self._number[used] = np.arange(len(used))
        return RunKinds(start=used // self._width, end=used % self._width, of=self._number[code])


def _longest_repetition(labels: NDArray[np.int64]) -> tuple[int, int, int]:
    """Return (first, end, period) of the longest part of a chain that repeats itself."""
    best = 0, 0, 1
    # A stretch whose labels equal those `period` before it repeats from `period` before its begin.
    for period in range(1, min(_LONGEST_PERIOD, len(labels) - 1) + 1):
        is_again = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        changes = np.flatnonzero(is_again[1:] != is_again[:-1])
        for first, end in changes.reshape(-1, 2).tolist():
            if end - first + period > best[1] - best[0]:
                best = first, end + period, period
    return best
