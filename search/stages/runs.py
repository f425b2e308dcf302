"""Loads of any runs of consecutive blocks, without joining blocks one by one.

What `StageLoad.__add__` does, for many runs at once. With k(i) what block i keeps less what it
shares with the next one, and K its running sum,

    sums      a field of run i .. j-1 is a difference of running sums
    kept      K[j-1] - K[i] + kept(j-1)
    peaks     max over b in i .. j-1 of (K[b] + peak(b)) - K[i]

and a maximum over a range is that of two overlapping ranges whose lengths are powers of two,
kept for every start (a sparse table). So a run costs O(1), however long; the tables take
O(n log n).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.time.stage import StageLoad
from planner.plan import Recompute

Floats = NDArray[np.float64]

# Fields of a load that no search decision needs; left zero to save memory and time.
_UNUSED = (
    "host_forward_s",
    "host_backward_s",
    "forward_flop",
    "backward_flop",
)
_KEPT: dict[Recompute, str] = {
    "none": "saved_bytes", "selective": "selective_bytes", "full": "input_bytes",
}  # fmt: skip
_KEPT_WITH_PEAK = (
    ("saved_bytes", "saved_peak_bytes"),
    ("input_bytes", "recompute_peak_bytes"),
    ("selective_bytes", "selective_peak_bytes"),
)
_LARGEST = ("side_bytes", "largest_param_bytes")
_LAST = "tail_bytes"


def used_fields() -> list[Field]:
    """Return the fields of a load that are laid out along the chain."""
    return [f for f in fields(StageLoad) if f.name not in _UNUSED]


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Loads of runs of a chain. `blocks` has an array entry for each block; `ties` are
    (i, j, bytes): parameters that blocks i < j share, held once by a run of both.
    """

    blocks: StageLoad
    ties: tuple[tuple[int, int, float], ...]

    def loads(self, start: NDArray[np.intp], end: NDArray[np.intp]) -> StageLoad:
        """Return the loads of runs start .. end-1, in the shape the two broadcast to."""
        level = np.frexp((end - start).astype(float))[1] - 1
        right = end - (1 << level)

        def largest(name: str) -> Floats:
            table = self._maxima[name]
            return np.maximum(table[level, start], table[level, right])

        columns = {name: total[end] - total[start] for name, total in self._sums.items()}
        for i, j, size in self.ties:
            both = (start <= i) & (end > j)
            columns["param_bytes"] = columns["param_bytes"] - size * both
        for kept, peak in _KEPT_WITH_PEAK:
            before = self._before[kept]
            columns[kept] = before[end - 1] - before[start] + getattr(self.blocks, kept)[end - 1]
            columns[peak] = largest(peak) - before[start]
        for name in _LARGEST:
            columns[name] = largest(name)
        columns[_LAST] = np.broadcast_to(getattr(self.blocks, _LAST)[end - 1], level.shape)
        return StageLoad(**columns)

    def kept_sums(self, recompute: Recompute) -> Floats:
        """Return running sums (n + 1) of what blocks keep of a microbatch, side inputs apart: a run
        keeps the difference of two at least.
        """
        name = _KEPT[recompute]
        before = self._before[name]
        return np.append(before, before[-1] + getattr(self.blocks, name)[-1])

    @cached_property
    def _sums(self) -> dict[str, Floats]:
        """Running sums with a leading zero, of the fields that simply add."""
        special = {name for pair in _KEPT_WITH_PEAK for name in pair} | {*_LARGEST, _LAST}
        return {
            f.name: np.append(0.0, np.cumsum(getattr(self.blocks, f.name)))
            for f in used_fields()
            if f.name not in special
        }

    @cached_property
    def _before(self) -> dict[str, Floats]:
        """K of the header: what the blocks before each one keep, shared outputs counted once."""
        result = {}
        for name, _ in _KEPT_WITH_PEAK:
            kept = getattr(self.blocks, name)
            shared = np.zeros_like(kept)
            if name == "saved_bytes":
                shared[:-1] = np.minimum(self.blocks.tail_bytes[:-1], kept[1:])
            result[name] = np.append(0.0, np.cumsum(kept - shared)[:-1])
        return result

    @cached_property
    def _maxima(self) -> dict[str, Floats]:
        """Sparse tables by (level, start): the maximum of 2 ** level blocks from a start on."""
        tables = {
            peak: sparse_table(self._before[kept] + getattr(self.blocks, peak))
            for kept, peak in _KEPT_WITH_PEAK
        }
        return tables | {name: sparse_table(getattr(self.blocks, name)) for name in _LARGEST}


def sparse_table(values: Floats) -> Floats:
    """Return maxima of 2 ** level values from each start on; past the end, of what there is."""
    levels = [values]
    width = 1
    while 2 * width <= len(values):
        half = levels[-1]
        both = half.copy()
        both[:-width] = np.maximum(half[:-width], half[width:])
        levels.append(both)
        width *= 2
    return np.stack(levels)


def distinct(*columns: Floats) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the distinct rows of columns of whole numbers, and the row of each entry.

    A chain of few classes has few kinds of runs however long it is.
    """
    code = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        # Mixes numbers of up to 64 bits; a collision would take billions of kinds.
        code = (code ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(29)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    rows = np.stack([column.reshape(-1)[first] for column in columns], axis=1)
    return rows, np.reshape(inverse, code.shape)
