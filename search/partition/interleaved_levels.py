"""How much ranks with several stages recompute: levels, each of which recomputes more.

A rank's stages recompute alike, or of its blocks, stage by stage, the first ones more. Its choices
are put in a line: with none, selective and full and N blocks on the rank,

    level    0      1 .. N - 1             N           N + 1 .. 2 N - 1       2 N
    blocks   none   the first selective    selective   the first full         full

Microbatches are longer in flight in a stage that comes earlier in the model, so its blocks free the
most. With each level a rank keeps no more and none of its jobs is shorter: the lowest level that
fits is the best of them, and it is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from planner.plan import Recompute
from search.partition.chain_problem import Floats
from search.stages.partial_recompute import PartialRecompute
from search.stages.stage_table import StageTable

Levels = NDArray[np.intp]
"""The level of each rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecomputeLevels:
    """The levels of the stages between `cuts`, stage s being on rank `homes[s]`."""

    table: StageTable
    cuts: tuple[int, ...]
    homes: NDArray[np.intp]
    choices: tuple[Recompute, ...]
    """What a whole rank may recompute, the lightest first."""
    polls: bool = False

    @cached_property
    def _pairs(self) -> tuple[tuple[int, PartialRecompute], ...]:
        """Each choice with the next heavier one, and its number among all pairs."""
        pairs = combinations(range(len(self.choices)), 2)
        partial = self.table.partial(self.choices, polls=self.polls)
        return tuple((at, partial[at]) for at, (i, j) in enumerate(pairs) if j == i + 1)

    @cached_property
    def _num_blocks(self) -> Levels:
        """Blocks of each rank."""
        return np.bincount(self.homes, weights=np.diff(self.cuts)).astype(np.intp)

    @cached_property
    def _unit(self) -> Levels:
        """Blocks by which a level of each rank exceeds the one before. Activations on the host are
        priced for stages that recompute alike.
        """
        return self._num_blocks if self.table.on_host.activations else 0 * self._num_blocks + 1

    @cached_property
    def most(self) -> Levels:
        """The highest level of each rank."""
        return len(self._pairs) * (self._num_blocks // self._unit)

    def of_stages(self, levels: Levels) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the choice of each stage, and the block up to which it recomputes more."""
        if not self._pairs:
            return (0,) * len(self.homes), (0,) * len(self.homes)
        pair, until = self._split(levels)
        choices = [len(self.choices) + self._pairs[p][0] for p in pair.tolist()]
        return tuple(choices), tuple(until.tolist())

    def of_cut(self, choices: Sequence[int], until: Sequence[int]) -> Levels:
        """Return the levels of ranks whose stages have these choices."""
        if not self._pairs:
            return 0 * self.most
        numbers = [at for at, _ in self._pairs]
        heavy = np.bincount(self.homes, weights=np.array(until) - self._start).astype(np.intp)
        pair = np.zeros_like(heavy)
        for home, choice in zip(self.homes.tolist(), choices, strict=True):
            pair[home] = numbers.index(choice - len(self.choices))
        levels: Levels = (pair * self._num_blocks + heavy) // self._unit
        return levels

    @cached_property
    def _start(self) -> Levels:
        return np.asarray(self.cuts[:-1])

    def _split(self, levels: Levels) -> tuple[Levels, Levels]:
        """Return each stage's pair of choices, and the block up to which it takes the heavier."""
        blocks = levels * self._unit
        pair = np.minimum(blocks // self._num_blocks, len(self._pairs) - 1)
        left = (blocks - pair * self._num_blocks)[self.homes] - self._before
        until: Levels = self._start + np.clip(left, 0, np.diff(self.cuts))
        return pair[self.homes], until

    @cached_property
    def _before(self) -> Levels:
        """Blocks of each stage's rank in earlier stages."""
        before = np.zeros(len(self.homes), dtype=np.intp)
        so_far = np.zeros_like(self._num_blocks)
        for stage, (home, length) in enumerate(
            zip(self.homes.tolist(), np.diff(self.cuts).tolist(), strict=True)
        ):
            before[stage] = so_far[home]
            so_far[home] += length
        return before

    def kept(self, levels: Levels) -> Floats:
        """Return the bytes that each stage keeps of one microbatch at least."""
        if not self._pairs:
            sums = self.table.runs.kept_sums(self.choices[0])
            whole: Floats = np.diff(sums[list(self.cuts)])
            return whole
        pair, until = self._split(levels)
        end = np.asarray(self.cuts[1:])
        kept = np.zeros(len(self.homes))
        for at, (_, partial) in enumerate(self._pairs):
            freed = partial.freed[until] - partial.freed[self._start]
            kept = np.where(pair == at, partial.kept[end] - partial.kept[self._start] - freed, kept)
        return kept

    def lowest(
        self, needed: Callable[[Levels], Floats], limit_bytes: float, lowest: Levels
    ) -> Levels:
        """Return the lowest level of each rank, none below `lowest`, at which what ranks need is
        within a limit; above `most` where it is at none.
        """
        low, high = lowest, np.maximum(lowest, self.most + 1)
        fits = needed(np.minimum(low, self.most)) <= limit_bytes
        high = np.where(fits & (low <= self.most), low, high)
        while (low < high).any():
            middle = (low + high) // 2
            fits = (needed(np.minimum(middle, self.most)) <= limit_bytes) & (middle <= self.most)
            is_open = low < high
            high = np.where(is_open & fits, middle, high)
            low = np.where(is_open & ~fits, middle + 1, low)
        return high
