"""Peak bytes of a rank with one stage, before there is a job table to play.

The cost model plays a rank's row job by job; this looks at the two moments that can be the
worst. Gradients kept in buckets (replicas without ZeRO) exist all the time. Others appear
with the first backward, so a stage that holds every microbatch before it has none at its
fullest, and one microbatch less when it has them. Loads may be arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from costmodel import StageLoad, rank_memory
from costmodel.memory import job_peak_bytes, kept_bytes
from planner.plan import Precision, Recompute
from profiles import Profile
from search.on_host import NOTHING, OnHost

_FAR_BYTES = 1e13
"""More than any rank holds, so that activations and not the optimizer are its worst moment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBytes:
    """The bytes of a rank with one stage, by the microbatches it holds at most.

    Where backward is split, gradients may come when most activations are gone: less is
    counted then, and the cost model has the last word.
    """

    load: StageLoad
    num_microbatches: int
    recompute: Recompute
    replicas: int
    zero: int
    profile: Profile
    precision: Precision = "model"
    receive_bytes: Any = 0
    batch_bytes: int = 0
    splits_backward: bool = False
    on_host: OnHost = NOTHING
    _lines: dict[bool, tuple[Any, Any]] = field(default_factory=dict)

    def at(self, in_flight: int) -> Any:
        """Return the peak with so many microbatches in flight."""
        kept = kept_bytes(self.load, recompute=self.recompute)
        worst: Any = 0.0
        for live, has_gradients in self._moments(in_flight):
            worst = np.maximum(worst, self._bytes(live * kept, self._top, has_gradients))
        return worst

    def fits(self, in_flight: int, limit_bytes: float) -> Any:
        """Whether `at(in_flight)` is within a limit, in a few steps however often it is asked.

        A moment's bytes are the larger of what the optimizer's step needs, whatever is in
        flight, and of a line in the bytes kept.
        """
        kept = kept_bytes(self.load, recompute=self.recompute)
        each = kept * (1 + self.profile.allocator_overhead_fraction)
        fits: Any = True
        for live, has_gradients in self._moments(in_flight):
            at_update, empty = self._line(has_gradients)
            fits = fits & (np.maximum(at_update, empty + live * each) <= limit_bytes)
        return fits

    def _moments(self, in_flight: int) -> tuple[tuple[int, bool], ...]:
        """Return (microbatches held, whether there are gradients) of moments that may be worst."""
        live = self.on_host.live(in_flight)
        in_buckets = self.zero == 0 and self.replicas > 1
        if in_buckets or in_flight < self.num_microbatches:
            return ((live, True),)
        if self.splits_backward or in_flight == 1:
            return ((live, False),)
        return ((live, False), (self.on_host.live(in_flight - 1), True))

    @property
    def _top(self) -> Any:
        """What the worst job of a microbatch needs above what the microbatch keeps."""
        kept = kept_bytes(self.load, recompute=self.recompute)
        return np.maximum(job_peak_bytes(self.load, recompute=self.recompute), kept) - kept

    def _line(self, has_gradients: bool) -> tuple[Any, Any]:
        """Return the bytes at the optimizer's step, and of jobs while nothing is kept."""
        if has_gradients not in self._lines:
            overhead = 1 + self.profile.allocator_overhead_fraction
            self._lines[has_gradients] = (
                self._bytes(0.0, -np.inf, has_gradients),
                self._bytes(_FAR_BYTES, self._top, has_gradients) - _FAR_BYTES * overhead,
            )
        return self._lines[has_gradients]

    def _bytes(self, kept: Any, transient: Any, has_gradients: bool) -> Any:
        return rank_memory(
            self.load,
            kept=kept,
            transient=transient,
            dp=self.replicas,
            zero_stage=self.zero,
            profile=self.profile,
            receive_bytes=self.receive_bytes,
            batch_bytes=self.batch_bytes,
            gradients_then=None if has_gradients else 0,
            precision=self.precision,
            optimizer_on_host=self.on_host.optimizer,
        ).total


def peak_bytes(load: StageLoad, *, in_flight: int, **options: Any) -> Any:
    """Return the bytes of a rank whose stage holds `in_flight` microbatches at most.

    `options` are `RankBytes`'s other fields.
    """
    return RankBytes(load=load, **options).at(in_flight)


def may_be_over(*, zero: int, splits_backward: bool) -> float:
    """Return by what factor `peak_bytes` may be above the cost model's own count.

    ZeRO 3 is walked block by block there, and tables that split backward free activations
    sooner; both were up to 1.14 above it on random small models. A limit loosened by it refuses
    nothing that fits.
    """
    return 1.15 if zero == 3 or splits_backward else 1.0 + 1e-9
