"""How much longer than its work a step is as ranks wait for round trips: a small linear program.

Stage s's path (`search.partition.chain_paths`) is at least sum_i A[s, i] t_i less what first blocks
send early, t_i being stage i's seconds of a microbatch, m microbatches. With a the part of a
block's seconds that comes after its gradient is sent on, at most:

    A[s, i] = 1 - a        i < s    the way to stage s and back
    A[s, i] = m - a - w_s  i = s    its own jobs, less the w_s that fit into its waits
    A[s, i] = above        i > s    the round trips it waits for:
              1                     one, with nothing else to do (after the last forward)
              2 - a                 two, with w_s = S - s - 1 jobs beside (first and last)

Early sends of first blocks are those of stages i > s, once. The step L is at least each row, hence
at least y A t for any weights y >= 0 of sum 1. The y that make y A a constant vector c prove
L >= c sum(t), whatever the cut; with equal stages and a = 0, c = (m + S - 1) / S.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.schedule import JobOrder, RoundTrips, find_schedule


def pipeline_line(schedule: str, pp: int, m: int, early: float = 0.0) -> tuple[float, float]:
    """Return (c, d) such that no stages of total t take less than c t - d times the longest part
    of a block that comes after its gradient is sent on; `early` is a of the header.
    """
    order = find_schedule(schedule).job_order(pp=pp, num_microbatches=m)
    return _line(order, pp, m, early)


@lru_cache(maxsize=4096)
def _line(order: JobOrder, pp: int, m: int, early: float) -> tuple[float, float]:
    keeps = 1.0 - early
    # Rows without any wait: what holds for all orders of jobs.
    without_waits = keeps / (1.0 - (1.0 - keeps / (m - early)) ** pp), 0.0
    later = np.arange(pp - 1, -1, -1)
    if m == 1:
        return without_waits
    if order.round_trips is RoundTrips.AFTER_LAST_FORWARD:
        above, beside = 1.0, 0 * later
    elif _waits_twice(order, later.tolist(), m):
        above, beside = 2.0 - early, later
    else:
        return without_waits
    matrix = keeps * np.tril(np.ones((pp, pp)), -1) + above * np.triu(np.ones((pp, pp)), 1)
    matrix += np.diag(m - early - beside)
    # The dual: y with y A = constant; only y >= 0 proves a bound.
    weights = np.linalg.solve(matrix.T, np.ones(pp))
    if weights.min() < 0:
        return without_waits
    total = weights.sum()
    return float(1.0 / total), float(weights @ later / total) if early else 0.0


def _waits_twice(order: JobOrder, later: list[int], m: int) -> bool:
    """Whether each rank's two round trips lie apart, and just one job for each later stage fits
    into either: with more jobs, as in a longer warmup, nothing of the wait may be left.
    """
    if order.round_trips is not RoundTrips.FIRST_AND_LAST:
        return False
    return m > max(order.warmup) and [count - 1 for count in order.warmup] == later
