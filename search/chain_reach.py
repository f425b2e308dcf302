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
        before, after = self._until
        until = before, _least_after(after)
        return [self._sums_of(stage, until) for stage in range(self._problem.num_stages)]

    def _sums_of(self, stage: int, until: tuple[Floats, Floats]) -> list[Sum]:
        problem = self._problem
        arrives = problem.start_s + problem.least_hop * stage
        ends = arrives + problem.least_back_hop * stage
        before, after = self._back(stage)
        sums = [(*until, arrives), (before, _least_after(after), ends)]
        if problem.family in ("1F1B", "ZB-H1"):
            bases = [(before, after, ends)]
            if problem.splits_backward:  # a stage's own end may come after the way back
                bases.append((*self._until, arrives))
            out = (problem.least_hop + problem.least_back_hop) * (problem.num_stages - 1 - stage)
            sums += [
                (before + done, _least_after(after + waited - done), more + times * out)
                for times, done, waited in self._waits(stage)
                for before, after, more in bases
            ]
        return sums

    def _back(self, stage: int) -> tuple[Floats, Floats]:
        """Sums of a stage's path with the way of the last gradient back to stage 0."""
        problem = self._problem
        before, after = self._until
        # Of how many microbatches the stage's weight gradients are not ahead of the last gradient.
        last = 0
        if problem.splits_backward:
            last = stage if problem.family == "ZB-H1" else problem.num_microbatches - 1
        weight = problem.before_w
        return before + problem.before_b + last * weight, after - (last + 1) * weight

    def _waits(self, stage: int) -> Iterator[tuple[int, Floats, Floats]]:
        """Yield what the first and last backward of a stage wait for, both or either: of how many
        of the two, what the stage does meanwhile, and what comes after it.
        """
        problem = self._problem
        m, warmup = problem.num_microbatches, problem.warmup(stage)
        between = min(warmup, m - 1)
        wait = problem.after - (problem.before_w[-1] - problem.before_w)
        meanwhile = [between * problem.before_f, between * problem.before_b]
        times = 1
        if problem.splits_backward:
            meanwhile.pop()  # with weight gradients done meanwhile there is little left to wait for
        elif m > warmup + 1:
            meanwhile, times = [meanwhile[0] + meanwhile[1]], 2
        for done in meanwhile:
            yield times, done, times * wait


def _least_after(values: Floats) -> Floats:
    """Return the least of each value and all after it."""
    return np.minimum.accumulate(values[::-1])[::-1]
