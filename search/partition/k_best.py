"""The k best partitions of a chain, as sets that split into smaller sets.

The dynamic program finds the partition of the least bound (`chain_paths`), which may simulate
slower than another one. Here a set of partitions is given by its first stages:

    f(first stages) = max(their paths, V[s, k])       V of `chain_dp`, with stage 0's tail

V is exact, so f is the bound of the best partition of the set: no set is split in vain, and each
split takes O(n), beside one pass of the dynamic program for every end of stage 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from search.partition.chain_dp import chain_values, reach_windows
from search.partition.chain_paths import lanes_of
from search.partition.chain_problem import ChainProblem, Cut, Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FirstStage:
    """A chain whose stage 0 ends at a given block: the tail it has then, and V of each stage."""

    tail: float
    values: tuple[Floats, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstStages:
    """All partitions with these first stages.

    Attributes:
        first: what follows from the end of stage 0.
        cuts: boundaries of the first stages, 0 included.
        choices: their recompute choices.
        path_s: the longest of their paths.
        bound: the least bound of a partition of the set.
    """

    first: _FirstStage
    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    path_s: float
    bound: float


class KBestPartitions:
    """All partitions of a problem whose bound is under a ceiling."""

    def __init__(self, problem: ChainProblem, ceiling: float) -> None:
        self._problem, self._ceiling = problem, ceiling
        windows = reach_windows(problem, ceiling)
        self._lanes = lanes_of(problem, windows) if windows else []
        # For V the quickest recompute choices suffice.
        self._quickest = lanes_of(problem, windows, quickest=True) if windows else []
        self.num_runs = sum(lane.until.size for lane in self._lanes)
        """Runs of blocks that one pass of the dynamic program visits."""

    def ends_of_first_stage(self) -> Iterator[tuple[int, float]]:
        """Yield each end of stage 0, as a row of its lane, with the bound of its partitions."""
        if not self._lanes:
            return
        values = chain_values(self._problem, self._quickest, first_tail=None)
        bare = self._quickest[0].own(None)[:, :, 0].min(axis=0)
        bounds = np.maximum(bare, values[1][self._lanes[0].end[:, 0]]) + self._first_tail
        for row in np.flatnonzero(bounds < self._ceiling).tolist():
            yield row, float(bounds[row])

    @property
    def _first_tail(self) -> Floats:
        """Seconds after the last job of stage 0, by its end."""
        lane = self._lanes[0]
        tail: Floats = lane.tail[:, 0] + self._problem.first_weight_s[lane.end[:, 0]]
        return tail

    def with_first_stage(self, row: int) -> Iterator[FirstStages]:
        """Yield the sets of partitions whose stage 0 ends at a row, by its recompute choice."""
        tail = float(self._first_tail[row])
        values = tuple(chain_values(self._problem, self._quickest, first_tail=tail))
        none = FirstStages(
            first=_FirstStage(tail=tail, values=values),
            cuts=(0,),
            choices=(),
            path_s=0.0,
            bound=0.0,
        )
        yield from self.split(none, rows=slice(row, row + 1))

    def split(self, some: FirstStages, rows: slice = slice(None)) -> Iterator[FirstStages]:
        """Yield the smaller sets in which the next stage is given too."""
        stage = len(some.choices)
        lane = self._lanes[stage]
        ends = lane.end[rows, some.cuts[-1] - lane.first_start]
        paths = np.maximum(lane.own_from(some.cuts[-1], some.first.tail, rows), some.path_s)
        bounds = np.maximum(paths, some.first.values[stage + 1][ends])
        for choice, row in np.argwhere(bounds < self._ceiling).tolist():
            yield FirstStages(
                first=some.first,
                cuts=(*some.cuts, int(ends[row])),
                choices=(*some.choices, choice),
                path_s=float(paths[choice, row]),
                bound=float(bounds[choice, row]),
            )

    def partition(self, some: FirstStages) -> Cut | None:
        """Return the partition of a set in which all stages are given; None if some are open."""
        if len(some.choices) < self._problem.num_stages:
            return None
        return Cut(cuts=some.cuts, choices=some.choices, value=some.path_s)
