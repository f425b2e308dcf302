"""How much longer than its work a step is as ranks wait for round trips: linear programs by hand.

A step is no shorter than any path (`search.partition.chain_paths`), nor than any mean of them, of
weights y >= 0 and sum 1. The y taken here make all stages alike, so that their boundaries do not
matter. S stages, m microbatches.

Whole backwards (`pipeline_line`). Stage s's path is at least sum_j A[s, j] t_j less what first
blocks send early, t_j being stage j's seconds of a microbatch. With a the part of a block's seconds
that comes after its gradient is sent on, at most:

    A[s, j] = 1 - a        j < s    the way to stage s and back
    A[s, j] = m - a - k_s  j = s    its own jobs, less the k_s that fit into its waits
    A[s, j] = above        j > s    the round trips it waits for:
              1                     one trip, with nothing else to do: k_s = 0 (after last forward)
              2 - a                 two trips, with k_s = S - s - 1 jobs beside (first and last)

Early sends of first blocks are those of stages j > s, once. The y that make y A a constant vector c
prove a step of c sum(t), whatever the cut; with equal stages and a = 0, c = (m + S - 1) / S.

Split backwards (`ZeroBubbleBound`), of schedules that wait for the first and the last round trip
and state how many weight gradients come last (ZB-H1). f, i, w: the seconds of a stage's F, I and W
job; k_s = min(m, warmup of stage s) - 1 the forwards that fit into its first round trip; l_s its
late weight gradients. Each stage s has two paths, to its own end and back to stage 0:

    sum over j < s of f_j  +  m (f + i + w)_s - k_s f_s  +  sum over j > s of (f + i)_j
    the same  +  sum over j < s of i_j  -  l_s w_s  +  w_0

The first backward returns when the microbatch has passed the later stages and back, meanwhile k_s
more forwards are done; l_s weight gradients come after the last gradient is sent on. A mean of
these paths is sum over j of (A f + B i + C w)_j, A, B, C >= 0 being y's means of the coefficients.
Wherever a block lies, it adds the least of (A f + B i + C w) over j at least; the first block lies
on stage 0 and the last on stage S - 1. y makes all stages alike for blocks of the chain's mean
f : i : w.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from planner.language.schedule.job_order import JobOrder, RoundTrips
from search.partition.chain_problem import Floats


@lru_cache(maxsize=4096)
def pipeline_line(order: JobOrder, pp: int, m: int, early: float = 0.0) -> tuple[float, float]:
    """Return (c, d) such that no stages of total t take less than c t - d times the longest part
    of a block that comes after its gradient is sent on; `early` is a of the header.
    """
    keeps = 1.0 - early
    # Rows without any wait: what holds for all orders of jobs.
    # A is lower triangular then: the sums of y from each stage on are a geometric series, of ratio
    # 1 - keeps / (m - early), and y sums to 1.
    without_waits = keeps / (1.0 - (1.0 - keeps / (m - early)) ** pp), 0.0
    # (stage) How many stages come after each.
    later = np.arange(pp - 1, -1, -1)
    if m == 1:
        return without_waits
    if order.round_trips is RoundTrips.AFTER_LAST_FORWARD:
        # Nothing runs in the wait between the last forward and the first backward.
        above, beside = 1.0, 0 * later
    elif _waits_twice(order, later.tolist(), m):
        # k_s of the header: the warmup forwards fill the first wait, as many backwards the last.
        above, beside = 2.0 - early, later
    else:
        return without_waits
    matrix = keeps * np.tril(np.ones((pp, pp)), -1) + above * np.triu(np.ones((pp, pp)), 1)
    matrix += np.diag(m - early - beside)
    # The dual: y with y A = constant; only y >= 0 proves a bound.
    weights = np.linalg.solve(matrix.T, np.ones(pp))
    if weights.min() < 0:
        return without_waits
    # Scaled to sum 1, y proves c; d is the mean number of
    # later stages whose first blocks send early.
    total = weights.sum()
    return float(1.0 / total), float(weights @ later / total) if early else 0.0


def _waits_twice(order: JobOrder, later: list[int], m: int) -> bool:
    """Whether each rank's two round trips lie apart, and just one job for each later stage fits
    into either: with more jobs, as in a longer warmup, nothing of the wait may be left.
    """
    if order.round_trips is not RoundTrips.FIRST_AND_LAST:
        return False
    return m > max(order.warmup) and [count - 1 for count in order.warmup] == later


@dataclass(frozen=True, kw_only=True, eq=False)
class ZeroBubbleBound:
    """The bound for blocks whose jobs take `seconds` (n, 3): forward, backward's input gradients
    and weight gradients.
    """

    seconds: Floats

    def least_step_s(self, order: JobOrder, num_microbatches: int, more_s: float = 0.0) -> float:
        """Return a step time that no boundaries can beat under an order of jobs; `more_s` is what
        all stages' forwards and backwards of a microbatch take beside their blocks.
        """
        return max(
            self._mean_of(coefficients, more_s)
            for coefficients in _means(order, num_microbatches, self._mean_block)
        )

    def _mean_of(self, coefficients: Floats, more_s: float) -> float:
        # coefficients: A, B, C by stage (3, S). Where the first and the last block lie is certain.
        first, last = self.seconds[0] @ coefficients[:, 0], self.seconds[-1] @ coefficients[:, -1]
        kinds, counts = self._inner_kinds
        # Wherever an inner block lies, it adds the least that it adds on any stage.
        inner = counts @ (kinds @ coefficients).min(axis=1)
        # An exchange lengthens some stage's F or I job: it
        # counts at the least coefficient of either.
        return float(first + inner + last + more_s * coefficients[:2].min())

    @cached_property
    def _mean_block(self) -> tuple[float, ...]:
        """The parts of f, i and w in the chain's seconds, roughly."""
        # Rounded, so that few different y are computed: any y >= 0 proves a bound.
        total = self.seconds.sum(axis=0)
        return tuple(np.round(total / total.sum(), 3).tolist())

    @cached_property
    def _inner_kinds(self) -> tuple[Floats, Floats]:
        # Equal blocks add the same wherever they lie, so each kind is looked at once.
        kinds, counts = np.unique(self.seconds[1:-1], axis=0, return_counts=True)
        return kinds.reshape(-1, 3), counts.astype(float)


@lru_cache(maxsize=4096)
def _means(order: JobOrder, m: int, mean_block: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return (A, B, C) of the header, by stage, for either kind of paths."""
    pp = len(order.warmup)
    stage, other = np.arange(pp)[:, None], np.arange(pp)[None, :]
    # (path of stage s, stage j)
    before, own, after = (1.0 * (other < stage), 1.0 * (other == stage), 1.0 * (other > stage))
    # k of the header: forwards that a rank does while its first microbatch is away.
    fitting = np.minimum(m, order.warmup)[:, None] - 1
    # (F, I or W; path of stage s; stage j) The two formulas of the header.
    ends = np.stack([before + after + (m - fitting) * own, after + m * own, m * own])
    returns = ends.copy()
    # The last gradient passes the earlier stages' I jobs. Late W jobs of the stage itself are not
    # on its way; stage 0 makes the last microbatch's weight gradients when it has come.
    returns[1] += before
    returns[2] -= np.array(order.late_weights)[:, None] * own
    returns[2, :, 0] += 1.0
    means = []
    for paths in (ends, returns):
        # (path, stage) Seconds of a mean block, by where it lies.
        matrix = np.tensordot(np.array(mean_block), paths, axes=1)
        # The dual: weights of the paths with which every stage's mean seconds are equal.
        weights = np.maximum(0.0, np.linalg.solve(matrix.T, np.ones(pp)))
        means.append(np.tensordot(weights / weights.sum(), paths, axes=(0, 1)).reshape(3, pp))
    return means[0], means[1]
