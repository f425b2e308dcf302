"""Where the stages of a chain may start if no path is to be longer than a ceiling.

A path (`chain_paths`) from block j to k is, without what replicas exchange, with the cheapest
transfers and the fastest choice of all other blocks, a sum of differences of running sums. It never
rises with j and never falls with k, and neither do the bytes that a rank needs at least
(`LeastNeeds`). So

    latest(s + 1) = the largest k to which, under some choice, stage s may reach from latest(s)

is the furthest that s + 1 stages get, likewise `earliest` from the end, and if `latest(S)` is not
the end no cut is short enough: O(n / S) a stage, where the chain DP looks at all runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np

from planner.deadline import check_time
from search.partition.chain_paths import path_parts
from search.partition.chain_problem import ChainProblem, Flags, Indices
from search.partition.chain_windows import Window, even_reach, fixed_windows, stage_windows

_SLACK = 1e-9
"""Relative, for sums taken in another order than paths take them."""

Starts = tuple[tuple[int, int], ...]
"""(earliest, latest) start of each stage, and of what comes after the last."""


def possible_starts(problem: ChainProblem, ceiling: float) -> Starts | None:
    """Return the starts in cuts within memory whose paths are within a ceiling; None where there
    are none.
    """
    n, stages = problem.num_blocks, problem.num_stages
    is_within, reach = _run_check(problem, ceiling), reach_within(problem, ceiling)
    latest, earliest = [0], [n]
    for stage in range(stages):
        check_time()
        # A later start never has a longer path, so the latest start of this stage reaches furthest.
        start = latest[-1]
        ends = np.arange(start + 1, reach[start] + 1)
        # Paths never fall with their end, so the runs within the ceiling are the shortest.
        num_within = int(np.count_nonzero(is_within(stage, np.array([start]), ends)))
        if not num_within:
            return None
        latest.append(min(start + num_within, n - (stages - stage - 1)))
    if latest[-1] < n:
        return None
    for stage in reversed(range(stages)):
        end = earliest[-1]
        starts = np.arange(np.searchsorted(reach, end), end)
        # Paths never rise with their start: the starts within the ceiling are the nearest to `end`.
        earliest.append(end - int(np.count_nonzero(is_within(stage, starts, np.array([end])))))
    return tuple(zip(reversed(earliest), latest, strict=True))


def reach_within(problem: ChainProblem, bound: float) -> Indices:
    """Return where a stage from each block on (n + 1) must end to have before + m t <= bound."""
    if not np.isfinite(bound):
        return np.full(problem.num_blocks + 1, problem.num_blocks)
    # The largest k with least[k] - least[j] <= budget[j]: bisection, as running sums never fall.
    least = problem.num_microbatches * (problem.before_f + problem.before_b)
    # The first microbatch fills the pipeline up to block j before the stage's jobs begin.
    budget = bound * (1 + 1e-12) - problem.start_s - problem.before_f
    return np.searchsorted(least, least + budget, side="right") - 1


def reach_windows(
    problem: ChainProblem, ceiling: float, starts: Starts | None = None
) -> tuple[Window, ...] | None:
    """Return the runs of every cut that may have a path of at most `ceiling`, of stages that start
    within `starts`, if given; None: no cut.
    """
    n, stages, longest = problem.num_blocks, problem.num_stages, problem.longest
    if problem.cuts:
        return fixed_windows(problem.cuts)
    if stages > n:
        return None
    reach = np.minimum(even_reach(n, longest), reach_within(problem, ceiling))
    return stage_windows(reach, stages, starts)


def _run_check(problem: ChainProblem, ceiling: float) -> Callable[[int, Indices, Indices], Flags]:
    """Return whether runs of a stage, from `start` to `end`, may be within ceiling and memory."""
    needs, budget = problem.needs, ceiling * (1 + _SLACK)
    # What never rises with the start must not depend on the transfer that arrives just there.
    everywhere = np.ones(problem.num_blocks + 1)
    cheapest = replace(
        problem,
        transfer_s=problem.least_transfer * everywhere,
        back_transfer_s=problem.least_back_transfer * everywhere,
        views=(),
    )
    # (choice, n + 1) Running sums.
    backward_s = np.stack(needs.backward_s) if needs else problem.before_b[None]
    if needs:
        kept_bytes, param_bytes = np.stack(needs.kept_bytes), np.array(needs.param_bytes)
        bare_backward_s = np.array(needs.bare_backward_s)

    def is_within(stage: int, start: Indices, end: Indices) -> Flags:
        forward = problem.before_f[end] - problem.before_f[start]
        backward = backward_s[:, end] - backward_s[:, start]
        lines = needs.lines(problem.in_flight[stage]) if needs else ()
        if needs:
            params = param_bytes[end] - param_bytes[start]
        if needs and needs.partial:
            bare = bare_backward_s[end] - bare_backward_s[start]
            # Bytes that a microbatch may keep beside the run's parameters, by the tightest line.
            most = reduce(
                np.minimum, ((room - slope * params) / live for live, slope, room in lines if live)
            )
            again = [bare + part.least_again_s(start, end, most) for part in needs.partial]
            backward = np.concatenate([backward, again])
        # 0 * inf would be nan in the sums of a path; what is infinite is taken out below.
        is_finite = np.isfinite(backward)
        backward = np.where(is_finite, backward, 0.0)
        until, back = path_parts(cheapest, stage, start, end, forward, backward)
        # The end of a path without tails: max(back + tail(0), tail(s)) >= max(back, 0).
        short: Flags = until + np.maximum(0.0, back) <= budget
        short &= is_finite
        if needs:
            # Partial recomputation keeps what is left to keep; only parameters may be too large.
            kept = kept_bytes[:, end] - kept_bytes[:, start]
            kept = np.concatenate([kept, np.zeros((len(backward) - len(kept), *kept.shape[1:]))])
            for live, slope, room in lines:
                short &= live * kept + slope * params <= room
        # Any choice will do.
        return np.any(short, axis=0)

    return is_within
