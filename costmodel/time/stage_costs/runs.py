"""Bytes of any runs of consecutive blocks, without joining blocks one by one.

The rule of `load`, for many runs at once. With k(i) what block i saves less what it shares with
the next block, and K its running sum,

    sums      a field of run i .. j-1 is a difference of running sums
    saved     K[j-1] - K[i] + saved(j-1)
    largest   the maximum of a field over i .. j-1

and a maximum over a range is that of two overlapping ranges whose lengths are powers of two,
known for every start (a sparse table). So a run costs O(1), however long; the tables take
O(n log n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.time.stage_costs.load import LOAD_FIELDS, SAVED, StageLoad
from planner.language.plan import Recompute

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]
Tie = tuple[int, int, Mapping[str, float]]
"""(i, j, amounts by field of `StageLoad`): what blocks i < j share is resident once in a run of
both; j is the next user."""

_LARGEST = ("side_bytes", "largest_param_bytes")
_LAST = "tail_bytes"
_FROZEN = ("frozen_bytes", "frozen_param_bytes", "frozen_backward_bytes")
_SPREAD = ("spread_bytes", "num_spread")
_PARAMS = ("param_bytes", "num_params")
_NARROW = ("narrow_bytes",)
_SUMS = (*_PARAMS, *_FROZEN, *_SPREAD, *_NARROW)
assert {*SAVED.values(), *_LARGEST, _LAST, *_SUMS} == {*LOAD_FIELDS}, "every field has a rule"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunLoads:
    """Bytes of runs of a chain."""

    blocks: StageLoad
    """Bytes of each block, as arrays along the chain (n)."""
    ties: tuple[Tie, ...] = ()
    """What blocks share."""

    def loads(self, start: Indices, end: Indices) -> StageLoad:
        """Return the bytes of runs start .. end-1, in the shape the two broadcast to."""
        columns = dict(zip(_SUMS, self._added(_SUMS, start, end), strict=True))
        for saved in SAVED.values():
            before = self._before[saved]
            # Of the last block nothing is shared: its next block is in another run.
            columns[saved] = before[end - 1] - before[start] + getattr(self.blocks, saved)[end - 1]
        for name in _LARGEST:
            columns[name] = largest_in(self._maxima[name], start, end)
        shape = np.broadcast_shapes(np.shape(start), np.shape(end))
        columns[_LAST] = np.broadcast_to(getattr(self.blocks, _LAST)[end - 1], shape)
        return StageLoad(**columns)

    def params(self, start: Indices, end: Indices) -> tuple[Floats, Floats]:
        """Return the trainable bytes of runs, and the number of their tensors."""
        param_bytes, num_params = self._added(_PARAMS, start, end)
        return param_bytes, num_params

    def spread(self, start: Indices, end: Indices) -> list[Floats]:
        """Return the bytes of runs' parameters on the experts' mesh, and the number of these."""
        return self._added(_SPREAD, start, end)

    def narrow(self, start: Indices, end: Indices) -> Floats:
        """Return the bytes of runs' parameters that ZeRO gathers in 8 bits."""
        (found,) = self._added(_NARROW, start, end)
        return found

    def frozen(self, start: Indices, end: Indices) -> list[Floats]:
        """Return what runs hold and do not train: all, parameters, those gathered in a backward."""
        return self._added(_FROZEN, start, end)

    def _added(self, names: Sequence[str], start: Indices, end: Indices) -> list[Floats]:
        """Return fields of runs that simply add, what blocks share counted once."""
        found = [self.sums[name][end] - self.sums[name][start] for name in names]
        for i, j, held in self.ties:
            # The running sums count a tensor at each of its users. i and j are neighbours among
            # these: a run with both has it once too often.
            has_both = (start <= i) & (end > j)
            for at, name in enumerate(names):
                if name in held:
                    found[at] = found[at] - held[name] * has_both
        return found

    def kept_sums(self, recompute: Recompute) -> Floats:
        """Return running sums (n + 1) of what blocks save of a microbatch, side inputs apart: a run
        saves the difference of two at least.
        """
        name = SAVED[recompute]
        before = self._before[name]
        return np.append(before, before[-1] + getattr(self.blocks, name)[-1])

    def kept(self, start: Indices, end: Indices, by_block: Sequence[Recompute]) -> Floats:
        """Return what a microbatch keeps of runs if the blocks of the chain recompute this, side
        inputs apart.
        """
        sums, shared = self.kept_along(by_block)
        kept: Floats = sums[end] - sums[start] + shared[end - 1]
        return kept

    def kept_along(self, by_block: Sequence[Recompute]) -> tuple[Floats, Floats]:
        """Return running sums (n + 1) of what blocks that recompute this save of a microbatch, and
        what each (n) saves that its next block saves, too, and that is counted there.
        """
        names = np.array(by_block)
        saved = np.select(
            [names == choice for choice in SAVED],
            [getattr(self.blocks, field) for field in SAVED.values()],
        )
        before = self._before_each(saved, keeps_all=names == "none")
        sums = np.append(before, before[-1] + saved[-1])
        return sums, saved - np.diff(sums)

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """Running sums (n + 1) of the fields that simply add."""
        return {name: np.append(0.0, np.cumsum(getattr(self.blocks, name))) for name in _SUMS}

    @cached_property
    def _before(self) -> dict[str, Floats]:
        """K of the header: what the blocks before each one save, shared outputs counted once."""
        return {
            name: self._before_each(
                getattr(self.blocks, name),
                keeps_all=np.full(len(self.blocks.saved_bytes), name == "saved_bytes"),
            )
            for name in SAVED.values()
        }

    def _before_each(self, saved: Floats, *, keeps_all: Flags) -> Floats:
        """Return K of the header for what each block saves; those without recomputation
        (`keeps_all`) save their outputs, which the next block may save as its inputs.
        """
        # A block can't share more than the next block saves, however much it hands on.
        shared = np.zeros_like(saved)
        shared[:-1] = np.minimum(self.blocks.tail_bytes[:-1], saved[1:]) * keeps_all[:-1]
        return np.append(0.0, np.cumsum(saved - shared)[:-1])

    @cached_property
    def _maxima(self) -> dict[str, Floats]:
        """Sparse tables by (level, start): the maximum of 2 ** level blocks from a start on."""
        return {name: sparse_table(getattr(self.blocks, name)) for name in _LARGEST}


def sparse_table(values: Floats) -> Floats:
    """Return maxima of 2 ** level values from each start on; past the end, of what there is."""
    levels = [values]
    width = 1
    while 2 * width <= len(values):
        half = levels[-1]
        both = half.copy()
        # A range of twice the width is two neighbouring ranges.
        both[:-width] = np.maximum(half[:-width], half[width:])
        levels.append(both)
        width *= 2
    return np.stack(levels)


def largest_in(table: Floats, start: Indices, end: Indices) -> Floats:
    """Return the largest value of start .. end-1 from a sparse table of the values."""
    # Two ranges of 2 ** level values, from either end, cover the run. `frexp` gives the exponent
    # of the next power of two, so level is the whole part of log2(end - start).
    level = np.frexp((end - start).astype(float))[1] - 1
    largest: Floats = np.maximum(table[level, start], table[level, end - (1 << level)])
    return largest
