"""Where the stages of a chain may start if no path is to be longer than a ceiling.

A path (`chain_paths`) from block j to k is, without recomputation, memory and what replicas
exchange, a sum A(j) + G(k) of prefix sums, or the largest of a few such. A never rises with j. So

    latest(s + 1) = the largest k with  min over k' >= k of G(k')  <=  ceiling - A(latest(s))

is the furthest that s + 1 stages get, likewise `earliest` from the end, and if `latest(S)` is not
the end no cut is short enough: O(log n) a stage, where the chain DP looks at all runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from search.chain_problem import ChainProblem, Floats

_SLACK = 1e-9
"""Relative, for sums taken in another order than paths take them."""


Sum = tuple[Floats, Floats, float]
"""A by start, the least G from each end on, and what both leave out."""


class Reach:
    """How far stages of a problem get. Keeps the sums that no path of a stage is shorter than."""

    def __init__(self, problem: ChainProblem) -> None:
        m = problem.num_microbatches
        f, b = problem.before_f, problem.before_b
        self._problem = problem
        self._until = f - m * (f + b), m * (f + b)
        before, after = self._until
        if problem.family == "split":
            self._back = before + (1 + m) / 2 * b, after - m / 2 * b
        else:
            self._back = before + b, after - problem.before_w

    def starts(self, ceiling: float) -> tuple[tuple[int, int], ...] | None:
        """Return (earliest, latest) start of each stage, and of what comes after the last, in
        cuts whose paths are within a ceiling; None where there are none.
        """
        problem = self._problem
        n, stages = problem.num_blocks, problem.num_stages
        budget = ceiling * (1 + _SLACK)
        latest = [0]
        for stage, sums in enumerate(self._sums):
            at = latest[-1]
            reach = min(
                int(np.searchsorted(after, budget - more - before[at], side="right")) - 1
                for before, after, more in sums
            )
            if reach <= at:
                return None
            latest.append(min(reach, n - (stages - stage - 1)))
        if latest[-1] < n:
            return None
        earliest = [n]
        for sums in reversed(self._sums):
            end = earliest[-1]
            earliest.append(
                max(
                    int(np.searchsorted(-before, after[end] - budget + more, side="left"))
                    for before, after, more in sums
                )
            )
        return tuple(zip(reversed(earliest), latest, strict=True))

    @cached_property
    def _sums(self) -> list[list[Sum]]:
        """By stage."""
        until, back = ((before, _least_after(after)) for before, after in (self._until, self._back))
        return [self._sums_of(stage, until, back) for stage in range(self._problem.num_stages)]

    def _sums_of(
        self, stage: int, until: tuple[Floats, Floats], back: tuple[Floats, Floats]
    ) -> list[Sum]:
        problem = self._problem
        arrives = problem.start_s + problem.least_hop * stage
        ends = arrives + problem.least_back_hop * stage
        if problem.family == "split" and stage == 0:
            return [(*until, ends)]
        sums = [(*until, arrives), (*back, ends)]
        if problem.family == "1F1B":
            out = (problem.least_hop + problem.least_back_hop) * (problem.num_stages - 1 - stage)
            sums += [(*one, ends + times * out) for times, one in self._waits(stage)]
        return sums

    def _waits(self, stage: int) -> Iterator[tuple[int, tuple[Floats, Floats]]]:
        """Yield the way back with what 1F1B's first and last backward of a stage wait for: of
        both, or of either; first how many of the two.
        """
        problem = self._problem
        m, warmup = problem.num_microbatches, problem.in_flight[stage] - 1
        between = min(warmup, m - 1)
        wait = problem.after - (problem.before_w[-1] - problem.before_w)
        before, after = self._back
        meanwhile = [between * problem.before_f, between * problem.before_b]
        if m > warmup + 1:
            meanwhile, times = [meanwhile[0] + meanwhile[1]], 2
        else:
            times = 1
        for done in meanwhile:
            yield times, (before + done, _least_after(after + times * wait - done))


def _least_after(values: Floats) -> Floats:
    """Return the least of each value and all after it."""
    return np.minimum.accumulate(values[::-1])[::-1]
