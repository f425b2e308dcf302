"""How much ranks with several stages recompute: levels, each of which recomputes more.

A rank's stages recompute alike, or of its blocks, stage by stage, the first ones more. Its choices
are put in a line: with none, selective and full and N blocks on the rank,

    level    0      1 .. N - 1             N           N + 1 .. 2 N - 1       2 N
    blocks   none   the first selective    selective   the first full         full

Microbatches are longer in flight in a stage that comes earlier in the model, so its blocks free the
most. With each level a rank keeps no more and none of its jobs is shorter: the lowest level that
fits is the best of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from planner.language.plan import Recompute
from search.partition.chain_problem import Flags, Floats
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
        # `partial` is in the order of combinations; a level
        # steps from a choice to the next heavier.
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
        # Pairs are numbered behind the choices of whole stages, as in `RankCostWindow`.
        choices = [len(self.choices) + self._pairs[p][0] for p in pair.tolist()]
        return tuple(choices), tuple(until.tolist())

    def of_cut(self, choices: Sequence[int], until: Sequence[int]) -> Levels:
        """Return the levels of ranks whose stages have these choices."""
        if not self._pairs:
            return 0 * self.most
        numbers = [at for at, _ in self._pairs]
        # Blocks of each rank that take the heavier choice of its pair.
        heavy = np.bincount(self.homes, weights=np.array(until) - self._start).astype(np.intp)
        pair = np.zeros_like(heavy)
        for home, choice in zip(self.homes.tolist(), choices, strict=True):
            pair[home] = numbers.index(choice - len(self.choices))
        # Each pair passed is a level for each block of the rank.
        levels: Levels = (pair * self._num_blocks + heavy) // self._unit
        return levels

    @cached_property
    def _start(self) -> Levels:
        return np.asarray(self.cuts[:-1])

    def _split(self, levels: Levels) -> tuple[Levels, Levels]:
        """Return each stage's pair of choices, and the block up to which it takes the heavier, for
        levels of ranks (..., rank).
        """
        blocks = levels * self._unit
        # Levels 0 .. N are of the first pair, N .. 2 N of the second: N is either's end.
        pair = np.minimum(blocks // self._num_blocks, len(self._pairs) - 1)
        # The heavier choice goes to the rank's blocks stage
        # by stage: earlier stages are served first.
        left = (blocks - pair * self._num_blocks)[..., self.homes] - self._before
        until: Levels = self._start + np.clip(left, 0, np.diff(self.cuts))
        return pair[..., self.homes], until

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

    @cached_property
    def kept(self) -> Floats:
        """Bytes that each stage saves of a microbatch at least (level, stage)."""
        if not self._pairs:
            sums = self.table.runs.kept_sums(self.choices[0])
            whole: Floats = np.diff(sums[list(self.cuts)])[None]
            return whole
        every = np.arange(self.most.max() + 1)[:, None]
        # (level, stage) Ranks of fewer levels keep as little as at their highest.
        pair, until = self._split(np.minimum(every, self.most))
        end = np.asarray(self.cuts[1:])
        kept = np.zeros(pair.shape)
        for at, (_, partial) in enumerate(self._pairs):
            # The blocks up to `until` keep their inputs alone; the others all that they saved.
            freed = partial.freed[until] - partial.freed[self._start]
            kept = np.where(pair == at, partial.kept[end] - partial.kept[self._start] - freed, kept)
        return kept

    @cached_property
    def _again_s(self) -> Floats:
        """Seconds that recomputation adds to a microbatch's backward on each stage (level, stage).

        Not clipped as E of `PartialRecompute` is, which may be more than blocks take.
        """
        first, end = self._start, np.asarray(self.cuts[1:])
        if not self._pairs:
            alone = self.table.chain_where(polls=self.polls).times.recompute_s(self.choices[0])
            return np.add.reduceat(alone, first)[None]
        every = np.arange(self.most.max() + 1)[:, None]
        pair, until = self._split(np.minimum(every, self.most))
        again = np.zeros(pair.shape)
        for at, (_, partial) in enumerate(self._pairs):
            heavy = partial.heavy_s[until] - partial.heavy_s[first]
            seconds = heavy + partial.light_s[end] - partial.light_s[until]
            again = np.where(pair == at, seconds, again)
        return again

    def again_s(self, levels: Levels) -> Floats:
        """Return what recomputation adds to a microbatch's backward, by stage."""
        seconds: Floats = self._again_s[levels[self.homes], np.arange(len(self.homes))]
        return seconds

    @cached_property
    def least_kept(self) -> Floats:
        """Bytes that the stage of each rank saves that saves least (level, rank)."""
        # Stages sorted by rank, so that a rank is one slice of `reduceat`.
        by_home = np.argsort(self.homes, kind="stable")
        first = np.searchsorted(self.homes[by_home], np.arange(len(self.most)))
        least: Floats = np.minimum.reduceat(self.kept[:, by_home], first, axis=1)
        return least

    def lowest(self, fits: Flags, lowest: Levels) -> Levels:
        """Return the lowest level of each rank, none below `lowest`, that fits (level, rank); above
        `most` where none does.
        """
        level = np.arange(len(fits))[:, None]
        fits = fits & (level >= lowest) & (level <= self.most)
        # argmax of flags is the first that is set.
        found: Levels = np.where(fits.any(axis=0), fits.argmax(axis=0), self.most + 1)
        return found
