"""Bounds that need no stage boundaries: cheap reasons to leave a configuration out.

Time. Let T be the seconds of one microbatch's forward and backward through all blocks on one
rank's shards, m the microbatches, pp the pipeline ranks. Any schedule takes at least

    m T / pp                                   some rank does at least its share of the work
    m * (longest block)                        a block lies on one rank
    T                                          one microbatch passes every block
    c(schedule, pp, m) T       vpp = 1         `pipeline_factor`: the paths of `chain_dp` with
                                               stages cut freely, as a linear program

Memory. Some rank holds at least its share of the parameters, and every block is held whole by
some rank that keeps at least one microbatch of it. With `a` the bytes a chain keeps per
microbatch and stage s holding k_s microbatches at most, sum over s of kept_s >= a and
kept_s <= L / k_s, so L >= a / sum(1 / k_s).

Each bound is below the cost model's own answer, so pruning by it is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from costmodel.memory import kept_bytes
from costmodel.stage import StageLoad, again_seconds
from planner.plan import Recompute
from planner.schedule import find_schedule
from search.rank_bytes import peak_bytes
from search.space import Configuration, Shape, recompute_choices
from search.stage_table import StageTable


@dataclass(kw_only=True, eq=False)
class TableBounds:
    """Bounds of all configurations that share a table; remembers what they have in common."""

    table: StageTable
    _memory: dict[tuple, float] = field(default_factory=dict)
    _seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def block_seconds(self, recompute: str) -> tuple[float, float]:
        """Return one microbatch's seconds through all blocks, and through the longest one."""
        if recompute not in self._seconds:
            forward = self.table.forward_s
            load = self.table.blocks
            again = [again_seconds(load, choice) for choice in recompute_choices(recompute)]
            block = forward + self.table.backward_s + np.min(again, axis=0)
            self._seconds[recompute] = (float(block.sum()), float(block.max()))
        return self._seconds[recompute]

    def least_step_of_shape(self, shape: Shape) -> float:
        """Return a step time that no schedule and no stage boundaries can beat."""
        total, longest = self.block_seconds(shape.recompute)
        return max(shape.num_microbatches * max(total / shape.pp, longest), total)

    def least_step_s(self, configuration: Configuration) -> float:
        """Return a step time that no stage boundaries can beat, for `vpp` 1."""
        m, pp = configuration.num_microbatches, configuration.pp
        total, longest = self.block_seconds(configuration.recompute)
        bound = max(m * max(total / pp, longest), total)
        if not find_schedule(configuration.schedule).splits_backward:
            bound = max(bound, total * pipeline_factor(configuration.schedule, pp, m))
        return bound

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
        return peak_bytes(
            load,
            in_flight=1,
            num_microbatches=1,
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
            load = self.table.blocks
            choices = recompute_choices(configuration.recompute)
            kept = np.min([kept_bytes(load, recompute=choice) for choice in choices], axis=0)
            # Neighbours in one stage share what one keeps of its outputs.
            self._memory[key] = float(np.sum(np.maximum(0.0, kept - load.tail_bytes)))
        context = float(self.table.profile.context_bytes)
        live = map(self.table.on_host.live, in_flight)
        return context + self._memory[key] / sum(1.0 / k for k in live)


@lru_cache(maxsize=4096)
def pipeline_factor(schedule: str, pp: int, m: int) -> float:
    """Return c such that no stages of total t take less than c * t under the schedule.

    Stage s's path is at least sum_i A[s, i] t_i, with A[s, i] = 1 for i < s, m for i = s, and
    for i > s what the schedule's order adds (`chain_dp`): 1 for FThenB; for 1F1B
    2 after - w t_s at least, so 2 for i > s and m - w for i = s. The step L is at least
    each row, hence at least y A t for any weights y >= 0 of sum 1. The y that make y A a
    constant vector c prove L >= c sum(t); with equal stages c = (m + pp - 1) / pp.
    """
    best = 1.0 / (1.0 - (1.0 - 1.0 / m) ** pp) if m > 1 else 1.0
    if schedule == "fthenb":
        return max(best, (m + pp - 1) / pp)
    if schedule != "1f1b" or m <= pp:
        return best
    warmup = np.arange(pp - 1, -1, -1)
    matrix = np.tril(np.ones((pp, pp)), -1) + np.triu(2 * np.ones((pp, pp)), 1)
    matrix += np.diag(m - warmup)
    weights = np.linalg.solve(matrix.T, np.ones(pp))
    if weights.min() < 0:
        return best
    return max(best, float(1.0 / weights.sum()))
