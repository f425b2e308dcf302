"""Runs of a chain that are alike, because it repeats itself: each kind is priced once.

Most models are a few blocks at each end and one block many times between. There a run of blocks
costs the same wherever it lies, so of the runs of a window, some n w, a few times n or w are
different. A chain may also repeat several blocks in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.partition.chain_windows import Window

Indices = NDArray[np.intp]

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
        self.first, self.last, self.period = _longest_repetition(labels)
        self._is_used = np.zeros(self._width**2, dtype=bool)
        self._number = np.zeros(self._width**2, dtype=np.intp)

    def kinds(self, window: Window) -> RunKinds:
        """Return the kinds of a window's runs: those within the repetition are moved to its
        beginning by whole periods.
        """
        start, end = np.broadcast_arrays(window.start, window.end)
        moved = (window.start - self.first) // self.period * self.period
        moved = moved * ((start >= self.first) & (end <= self.last))
        code = (start - moved) * self._width + end - moved
        self._is_used[code] = True
        used = np.flatnonzero(self._is_used)
        self._is_used[used] = False
        self._number[used] = np.arange(len(used))
        return RunKinds(start=used // self._width, end=used % self._width, of=self._number[code])


def _longest_repetition(labels: NDArray[np.int64]) -> tuple[int, int, int]:
    """Return (first, end, period) of the longest part of a chain that repeats itself."""
    best = 0, 0, 1
    for period in range(1, min(_LONGEST_PERIOD, len(labels) - 1) + 1):
        is_again = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        changes = np.flatnonzero(is_again[1:] != is_again[:-1])
        for first, end in changes.reshape(-1, 2).tolist():
            if end - first + period > best[1] - best[0]:
                best = first, end + period, period
    return best
