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

from search.partition.chain_dp import chain_values
from search.partition.chain_paths import runs_by_stage
from search.partition.chain_problem import ChainProblem, Cut, Floats
from search.partition.chain_reach import reach_windows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstStages:
    """All partitions with these first stages.

    Attributes:
        cuts: boundaries of the first stages, 0 included; the end of stage 0 is always given.
        choices: their recompute choices; empty: only the end of stage 0 is given.
        tail_s: seconds after the last job of stage 0, as it ends there.
        values: V of each stage with this tail; empty before stage 0 has a choice.
        path_s: the longest path of the first stages, in seconds.
        bound: the least bound of a partition of the set, in seconds.
    """

    cuts: tuple[int, ...]
    choices: tuple[int, ...] = ()
    tail_s: float
    values: tuple[Floats, ...] = ()
    path_s: float = 0.0
    bound: float


class KBestPartitions:
    """All partitions of a problem whose bound is under a ceiling."""

    def __init__(self, problem: ChainProblem, ceiling: float) -> None:
        self._problem, self._ceiling = problem, ceiling
        # A run whose path is over the ceiling is in no partition under it.
        windows = reach_windows(problem, ceiling)
        self._stage_runs = runs_by_stage(problem, windows) if windows else []
        self.num_runs = sum(runs.until.size for runs in self._stage_runs)
        """Runs of blocks that one pass of the dynamic program visits."""

    def by_first_end(self) -> Iterator[FirstStages]:
        """Yield the set of partitions with each end of stage 0."""
        if not self._stage_runs:
            return
        runs = self._stage_runs[0]
        ends = runs.end[:, 0]
        tails = runs.tail[:, 0] + self._problem.first_weight_s[ends]
        values = chain_values(self._problem, self._stage_runs, first_tail=None)
        bare = self._stage_runs[0].own(None)[:, :, 0].min(axis=0)
        # Without tails inside paths, stage 0's tail comes after the longest of them at the least.
        bounds = np.maximum(bare, values[1][ends]) + tails
        for row in np.flatnonzero(bounds < self._ceiling).tolist():
            yield FirstStages(
                cuts=(0, int(ends[row])), tail_s=float(tails[row]), bound=float(bounds[row])
            )

    def split(self, some: FirstStages) -> Iterator[FirstStages]:
        """Yield the smaller sets in which the next stage is given too.

        The first split of an end of stage 0 takes a pass of the dynamic program.
        """
        stage = len(some.choices)
        start, runs = some.cuts[stage], self._stage_runs[stage]
        ends = runs.end[:, start - runs.first_start]
        # (choice, row) The longest path of the first stages, for each way to go on.
        paths = np.maximum(runs.own_from(start, some.tail_s), some.path_s)
        values = some.values
        if stage == 0:
            # V with this tail inside all paths: exact for all partitions of this end of stage 0.
            values = tuple(chain_values(self._problem, self._stage_runs, first_tail=some.tail_s))
            paths[:, ends != some.cuts[1]] = np.inf
        bounds = np.maximum(paths, values[stage + 1][ends])
        for choice, row in np.argwhere(bounds < self._ceiling).tolist():
            yield FirstStages(
                cuts=(*some.cuts[: stage + 1], int(ends[row])),
                choices=(*some.choices, choice),
                tail_s=some.tail_s,
                values=values,
                path_s=float(paths[choice, row]),
                bound=float(bounds[choice, row]),
            )

    def partition(self, some: FirstStages) -> Cut | None:
        """Return the partition of a set in which all stages are given; None if some are open."""
        if len(some.choices) < self._problem.num_stages:
            return None
        return Cut(cuts=some.cuts, choices=some.choices, value=some.path_s)
