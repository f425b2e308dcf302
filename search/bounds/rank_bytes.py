"""Bytes of a rank with one stage, before there is a job table to play: a bound, and a guess.

The cost model plays a rank's row job by job. What it must find at least (`least`) is what lies
there all the time and, at the fullest moment between two jobs, what the microbatches in flight
keep; a search refuses by that alone, and asks the cost model about what it would take. Inside a
job there is more (`guess`): the height of the worst one, messages posted ahead.

Gradients kept in buckets (replicas without ZeRO) exist all the time. Others appear with the
first backward, so a stage that holds every microbatch before it has none at its fullest, and
one microbatch less when it has them. Loads may be arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from costmodel import StageLoad
from costmodel.memory.memory import ADAMW_STATES, job_peak_bytes, kept_bytes
from planner.plan import Precision, Recompute
from planner.plan.replication import gradient_factor
from profiles import Profile
from search.on_host import NOTHING, OnHost


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBytes:
    """The bytes of a rank with one stage, by the microbatches it holds at most.

    Where backward is split, gradients may come when most activations are gone, and activations
    go in two steps: less is counted then.
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

    def guess(self, in_flight: int) -> Any:
        """Return about what the cost model will find with so many microbatches in flight."""
        kept = self._kept
        top = np.maximum(job_peak_bytes(self.load, recompute=self.recompute), kept) - kept
        worst: Any = 0.0
        # Where backward is split, gradients are supposed to come as early as where it is not.
        splits = self.splits_backward and in_flight >= self.num_microbatches
        for live, has_gradients in self._moments(in_flight, splits=splits):
            more = np.maximum(top, self._in_messages) + self.receive_bytes
            worst = np.maximum(worst, self.holding(live * kept + more, has_gradients=has_gradients))
        return worst

    @property
    def _in_messages(self) -> Any:
        """About what FSDP2 has at the largest block under ZeRO 2 and 3: its gradients, under ZeRO 3
        its weights and the next block's. Whole weights and gradients of ZeRO 1 are there.
        """
        if not self._is_sharded or self.zero == 1:
            return 0.0
        wide = gradient_factor(self.precision)
        return (wide + 2 * int(self.zero == 3)) * self.load.largest_param_bytes

    def least(self, in_flight: int) -> Any:
        """Return bytes that the rank needs at least with so many microbatches in flight."""
        worst: Any = 0.0
        for live, has_gradients in self._moments(in_flight, splits=self.splits_backward):
            held = self.holding(live * self._kept, has_gradients=has_gradients)
            worst = np.maximum(worst, held)
        return worst

    def may_fit(self, in_flight: int, limit_bytes: float) -> Any:
        """Whether `least(in_flight)` is within a limit, in few steps however often it is asked."""
        room = self._room(limit_bytes)
        fits: Any = self._at_update <= room
        for live, has_gradients in self._moments(in_flight, splits=self.splits_backward):
            fits = fits & (live * self._kept <= room - self._beside[has_gradients])
        return fits

    def holding(self, kept_bytes: Any, *, has_gradients: bool) -> Any:
        """Return what the rank needs at least if it ever keeps so many bytes for backwards, with
        the first backward done or not.
        """
        live = np.maximum(kept_bytes + self._beside[has_gradients], self._at_update)
        return (live + self._always) * self._overhead + self.profile.context_bytes

    def _room(self, limit_bytes: float) -> Any:
        """What a limit leaves beside what is always there."""
        return (limit_bytes - self.profile.context_bytes) / self._overhead - self._always

    @property
    def _overhead(self) -> float:
        return 1 + self.profile.allocator_overhead_fraction

    @cached_property
    def _kept(self) -> Any:
        return kept_bytes(self.load, recompute=self.recompute)

    @property
    def _is_sharded(self) -> bool:
        return self.zero > 0 and self.replicas > 1

    def _moments(self, in_flight: int, *, splits: bool) -> tuple[tuple[int, bool], ...]:
        """Return (microbatches held, whether there are gradients) of moments that may be worst."""
        live = self.on_host.live(in_flight)
        in_buckets = self.zero == 0 and self.replicas > 1
        if in_buckets or (in_flight < self.num_microbatches and not splits):
            return ((live, True),)
        if splits or in_flight == 1:
            return ((live, False),)
        return ((live, False), (self.on_host.live(in_flight - 1), True))

    @property
    def _stepped(self) -> Any:
        """What the optimizer steps on: in bf16 fp32 masters, under ZeRO a shard."""
        wide = gradient_factor(self.precision)
        return wide * self.load.param_bytes / (self.replicas if self._is_sharded else 1)

    @cached_property
    def _always(self) -> Any:
        """Weights or shards, optimizer state (but for step counts), frozen tensors, the batch."""
        is_bf16 = self.precision == "bf16"
        states = (ADAMW_STATES + is_bf16) * self._stepped
        weights = self._stepped if self._is_sharded else self.load.param_bytes
        if self._is_sharded and (is_bf16 or self.on_host.optimizer):
            weights = 0  # what FSDP2 shards are the masters
        if self.on_host.optimizer:
            states = 0
        return weights + states + self.load.frozen_bytes + self.batch_bytes

    @cached_property
    def _at_update(self) -> Any:
        """Gradients, and what a fused or foreach step holds once more."""
        on_host = self.on_host.optimizer
        copies = int(self.profile.cluster.device_type != "cpu" and not on_host)
        return (copies + int(not (on_host and self._is_sharded))) * self._stepped

    @cached_property
    def _beside(self) -> Mapping[bool, Any]:
        """Gathered weights and gradients at the end of a job, by whether a backward is done.

        ZeRO 1 and 2 keep gathered weights from the first forward on, and ZeRO 1 sums whole
        gradients until the last backward.
        """
        params = self.load.param_bytes
        if not self._is_sharded:
            before = self._stepped if self.zero == 0 and self.replicas > 1 else 0.0 * params
            return {False: before, True: self._stepped}
        gathered = params if self.zero < 3 else 0.0 * params
        gradients = self._stepped
        if self.zero == 1:
            gradients = self.replicas * self._stepped
        elif self.on_host.optimizer:
            gradients = 0.0
        return {False: gathered, True: gathered + gradients}


def least_bytes(load: StageLoad, *, in_flight: int, **options: Any) -> Any:
    """Return what a rank needs at least whose stage holds `in_flight` microbatches at most.

    `options` are `RankBytes`'s other fields.
    """
    return RankBytes(load=load, **options).least(in_flight)


_UNIT = 1e12
"""Bytes of parameters by which a slope is taken; powers of ten lose nothing of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankLines:
    """Lines that ranks within a limit are under, as `RankBytes.may_fit` asks, by the microbatches
    in flight: live * bytes kept of each + slope * bytes of parameters <= room.

    `slopes` by whether a backward is done, `at_update` for the optimizer's step.
    """

    rank: RankBytes
    slopes: Mapping[bool, float]
    at_update: float
    room: float

    @classmethod
    def of(cls, limit_bytes: float, **options: Any) -> RankLines:
        """Return the lines of ranks with these of `RankBytes`'s other fields."""
        empty, full = (
            RankBytes(load=StageLoad(param_bytes=size), **options) for size in (0.0, _UNIT)
        )
        always = full._always - empty._always
        return cls(
            rank=full,
            slopes={done: float(size + always) / _UNIT for done, size in full._beside.items()},
            at_update=float(full._at_update + always) / _UNIT,
            room=float(empty._room(limit_bytes)),
        )

    def lines(self, in_flight: int) -> tuple[tuple[float, float, float], ...]:
        """Return (live, slope, room) of each line."""
        moments = self.rank._moments(in_flight, splits=self.rank.splits_backward)
        under = [(float(live), self.slopes[done], self.room) for live, done in moments]
        return (*under, (0.0, self.at_update, self.room))
