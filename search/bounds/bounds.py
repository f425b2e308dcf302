"""Bounds that need no stage boundaries: cheap reasons to leave a configuration out.

Time. Let T be the seconds of one microbatch's forward and backward through all blocks on one
rank's shards with what replicas exchange meanwhile, U what all ranks exchange and update once a
step (`exchange_bounds`), m the microbatches, pp the pipeline ranks. Any schedule takes at least

    (m T + U) / pp                             some rank does at least its share of the work
    m * (longest block)                        a block lies on one rank
    T                                          one microbatch passes every block
    c(schedule, pp, m) T - d   vpp = 1         `pipeline_line`: the paths of `chain_dp` with
                                               stages cut freely, as a linear program; for
                                               ZB-H1 `zero_bubble_bound`

A gradient may leave a stage ahead of weight gradients (`JobSeconds.sends_ahead_s`); the third
then is T less all of those but the first block's.

Memory. Some rank holds at least its share of the parameters, and every block is held whole by
some rank that keeps at least one microbatch of it. With `a` the bytes a chain keeps per
microbatch and stage s holding k_s microbatches at most, sum over s of kept_s >= a and
kept_s <= L / k_s, so L >= a / sum(1 / k_s).

What the first stage loads of the batch ahead of its first job comes to each of these. Each bound
is below the cost model's own answer, so pruning by it is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from costmodel import StageLoad
from planner.plan import Recompute
from planner.schedule import find_schedule
from search.bounds.exchange_bounds import LeastExchange
from search.bounds.rank_bytes import least_bytes
from search.bounds.zero_bubble_bound import ZeroBubbleBound
from search.partition.chain_problem import Floats
from search.space import Configuration, Shape, recompute_choices
from search.stages.stage_table import StageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """What may come after gradients are sent on: of all blocks but the first together, of one of
    them at most, and the largest part of any block's seconds.
    """

    after_first_s: float
    longest_s: float
    part: float


@dataclass(kw_only=True, eq=False)
class TableBounds:
    """Bounds of all configurations that share a table; remembers what they have in common."""

    table: StageTable
    _memory: dict[tuple, float] = field(default_factory=dict)
    _seconds: dict[str, Floats] = field(default_factory=dict)
    _exchange: dict[tuple[int, int, int], LeastExchange] = field(default_factory=dict)
    _ahead: dict[tuple[str, bool], _Ahead] = field(default_factory=dict)
    _zero_bubble: dict[tuple[str, bool], ZeroBubbleBound] = field(default_factory=dict)

    def block_seconds(self, recompute: str) -> float:
        """Return one microbatch's seconds through all blocks, nothing exchanged."""
        return float(self._of_blocks(recompute).sum())

    def _of_blocks(self, recompute: str) -> Floats:
        """Each block's seconds, forward and backward."""
        if recompute not in self._seconds:
            again = [self.table.recompute_s(choice) for choice in recompute_choices(recompute)]
            self._seconds[recompute] = (
                self.table.forward_s + self.table.backward_s + np.min(again, axis=0)
            )
        return self._seconds[recompute]

    def exchange(self, dp: int, cp: int, zero: int) -> LeastExchange:
        """Return what stages exchange with their replicas at least."""
        key = dp, cp, zero
        if key not in self._exchange:
            self._exchange[key] = LeastExchange(table=self.table, dp=dp, cp=cp, zero=zero)
        return self._exchange[key]

    def ahead(self, recompute: str, *, is_sharded: bool) -> _Ahead:
        """Return how much of backwards may come after their gradients are sent on."""
        key = recompute, is_sharded
        if key not in self._ahead:
            seconds = self.table.ahead_s(
                is_sharded=is_sharded, choices=recompute_choices(recompute)
            )
            whole = self.table.forward_s + self.table.backward_s
            self._ahead[key] = _Ahead(
                after_first_s=float(seconds[1:].sum()),
                longest_s=float(seconds[1:].max(initial=0.0)),
                part=float((seconds / np.where(seconds > 0, whole, 1.0)).max()),
            )
        return self._ahead[key]

    def zero_bubble(self, recompute: str, *, is_sharded: bool) -> ZeroBubbleBound:
        """Return the bound of ZB-H1, nothing exchanged; weight gradients that ZeRO reduces are made
        with the input's.
        """
        key = recompute, is_sharded
        if key not in self._zero_bubble:
            forward_s, weight_s = self.table.forward_s, self.table.weight_s * (not is_sharded)
            input_s = self._of_blocks(recompute) - forward_s - weight_s
            self._zero_bubble[key] = ZeroBubbleBound(
                seconds=np.stack([forward_s, input_s, weight_s], axis=1)
            )
        return self._zero_bubble[key]

    def least_step_of_shape(self, shape: Shape) -> float:
        """Return a step time that no schedule and no stage boundaries can beat."""
        least = min(
            self._least_of_any(
                pp=shape.pp, m=shape.num_microbatches, recompute=shape.recompute,
                exchange=self.exchange(shape.dp, shape.cp, zero),
            )
            for zero in shape.zeros
        )  # fmt: skip
        m = shape.num_microbatches
        return least + self.table.least_inputs_s(pp=shape.pp, num_microbatches=m)

    def least_step_s(self, configuration: Configuration) -> float:
        """Return a step time that no stage boundaries can beat, for `vpp` 1."""
        one = configuration
        m, pp = one.num_microbatches, one.pp
        exchange = self.exchange(one.dp, one.cp, one.zero)
        bound = self._least_of_any(pp=pp, m=m, recompute=one.recompute, exchange=exchange)
        if one.schedule == "zb_h1" and pp > 1:
            zero_bubble = self.zero_bubble(one.recompute, is_sharded=one.is_sharded)
            bound = max(bound, zero_bubble.least_step_s(pp, m, exchange.each_s(pp)))
        elif not find_schedule(one.schedule).splits_backward:
            ahead = self.ahead(one.recompute, is_sharded=one.is_sharded)
            part = round(ahead.part, 6) + 1e-6 if ahead.part else 0.0
            factor, firsts = pipeline_line(one.schedule, pp, m, part)
            total = self.block_seconds(one.recompute) + exchange.each_s(pp)
            bound = max(bound, total * factor - firsts * ahead.longest_s)
        return bound + self.table.least_inputs_s(pp=pp, num_microbatches=m)

    def _least_of_any(self, *, pp: int, m: int, recompute: str, exchange: LeastExchange) -> float:
        """Return the first three bounds of the header."""
        total = self.block_seconds(recompute) + exchange.each_s(pp)
        longest = float((self._of_blocks(recompute) + exchange.each_of_blocks_s).max())
        ahead = (
            self.ahead(recompute, is_sharded=exchange.is_sharded).after_first_s if pp > 1 else 0.0
        )
        return max((m * total + exchange.once_s(pp)) / pp, m * longest, total - ahead)

    def least_peak_bytes(self, configuration: Configuration) -> float:
        """Return bytes that the fullest rank of any stage boundaries needs at least."""
        one = configuration
        blocks = self._remember(("blocks", one.dp, one.zero, one.recompute), self._blocks, one)
        share = self._remember(("share", one.dp, one.zero, one.pp), self._share, one)
        return max(blocks, share)

    def _remember(
        self, key: tuple, compute: Callable[[Configuration], float], configuration: Configuration
    ) -> float:
        if key not in self._memory:
            self._memory[key] = compute(configuration)
        return self._memory[key]

    def _share(self, configuration: Configuration) -> float:
        load = self.table.blocks
        shared = sum(size for _, _, size in self.table.ties)
        part = StageLoad(param_bytes=float(load.param_bytes.sum() - shared) / configuration.pp)
        return float(self._peak(part, configuration, recompute="none"))

    def _blocks(self, configuration: Configuration) -> float:
        peaks = [
            self._peak(self.table.blocks, configuration, recompute=recompute)
            for recompute in recompute_choices(configuration.recompute)
        ]
        return float(np.min(peaks, axis=0).max())

    def _peak(self, load: StageLoad, configuration: Configuration, *, recompute: Recompute) -> Any:
        return least_bytes(
            load,
            in_flight=1,
            num_microbatches=configuration.num_microbatches,
            splits_backward=True,
            recompute=recompute,
            replicas=configuration.dp * configuration.cp,
            zero=configuration.zero,
            profile=self.table.profile,
            precision=self.table.precision,
            on_host=self.table.on_host,
        )

    def kept_bound(self, configuration: Configuration, in_flight: Sequence[int]) -> float:
        """Return the bytes that activations in flight alone must take on some rank."""
        key = ("kept", configuration.recompute)
        if key not in self._memory:
            choices = recompute_choices(configuration.recompute)
            kept = [np.diff(self.table.runs.kept_sums(choice)) for choice in choices]
            self._memory[key] = float(np.min(kept, axis=0).sum())
        context = float(self.table.profile.context_bytes)
        live = map(self.table.on_host.live, in_flight)
        return context + self._memory[key] / sum(1.0 / k for k in live)


@lru_cache(maxsize=4096)
def pipeline_line(schedule: str, pp: int, m: int, ahead: float = 0.0) -> tuple[float, float]:
    """Return (c, d) such that no stages of total t take less than c t - d times the longest part
    of a block that comes after its gradient is sent on; `ahead` is that part over its block's
    seconds, at most.

    Stage s's path is at least sum_i A[s, i] t_i less what first blocks send ahead, where with
    a = `ahead` A[s, i] = 1 - a for i < s, m - a for i = s, and for i > s what the schedule's
    order adds (`chain_dp`): 1 for FThenB; for 1F1B two `after` - w t_s at least, so 2 - a for
    i > s and m - a - w for i = s. First blocks are those of the stages i > s, once. The step L
    is at least each row, hence at least y A t for any weights y >= 0 of sum 1. The y that make
    y A a constant vector c prove L >= c sum(t); with equal stages and a = 0,
    c = (m + pp - 1) / pp.
    """
    keeps = 1.0 - ahead
    best = keeps / (1.0 - (1.0 - keeps / (m - ahead)) ** pp)
    if m == 1 or schedule not in ("1f1b", "fthenb") or (schedule == "1f1b" and m <= pp):
        return best, 0.0
    later = np.arange(pp - 1, -1, -1)
    above, warmup = (1.0, 0 * later) if schedule == "fthenb" else (2.0 - ahead, later)
    matrix = keeps * np.tril(np.ones((pp, pp)), -1) + above * np.triu(np.ones((pp, pp)), 1)
    matrix += np.diag(m - ahead - warmup)
    weights = np.linalg.solve(matrix.T, np.ones(pp))
    if weights.min() < 0:
        return best, 0.0
    total = weights.sum()
    return float(1.0 / total), float(weights @ later / total) if ahead else 0.0
