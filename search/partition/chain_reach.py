"""Where the stages of a chain may start if no path is to be longer than a ceiling.

A path (`chain_paths`) from block j to k is, without what replicas exchange and with the fastest
choice of all other blocks, a sum of differences of running sums. It never rises with j and never
falls with k, and neither do the bytes that a rank needs at least (`LeastNeeds`). So

    latest(s + 1) = the largest k to which, under some choice, stage s may reach from latest(s)

is the furthest that s + 1 stages get, likewise `earliest` from the end, and if `latest(S)` is not
the end no cut is short enough: O(log n) a stage, where the chain DP looks at all runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from planner.schedule import RoundTrips
from search.partition.chain_problem import ChainProblem

_SLACK = 1e-9
"""Relative, for sums taken in another order than paths take them."""

Path = Callable[[int, int], float]
"""Seconds of a stage's path from a block to another."""


class Reach:
    """How far stages of a problem get. Keeps the running sums."""

    def __init__(self, problem: ChainProblem) -> None:
        self._problem = problem
        self._forward: list[float] = problem.before_f.tolist()
        self._backward: list[float] = problem.before_b.tolist()
        self._weight: list[float] = problem.before_w.tolist()
        self._own = problem.needs.backward_s if problem.needs else (self._backward,)

    def starts(self, ceiling: float) -> tuple[tuple[int, int], ...] | None:
        """Return (earliest, latest) start of each stage, and of what comes after the last, in
        cuts whose paths are within a ceiling; None where there are none.
        """
        n, stages = self._problem.num_blocks, self._problem.num_stages
        budget = ceiling * (1 + _SLACK)
        latest = [0]
        for stage in range(stages):
            reach = self._furthest(stage, latest[-1], budget)
            if reach == latest[-1]:
                return None
            latest.append(min(reach, n - (stages - stage - 1)))
        if latest[-1] < n:
            return None
        earliest = [n]
        for stage in reversed(range(stages)):
            earliest.append(self._first(stage, earliest[-1], budget))
        return tuple(zip(reversed(earliest), latest, strict=True))

    def _furthest(self, stage: int, start: int, budget: float) -> int:
        """Return where a stage from a block on must end, under any choice."""
        n = self._problem.num_blocks
        ends, best = range(n + 1), start
        for choice in range(len(self._own)):
            path, fits = self._path(stage, choice), self._fits(stage, choice)
            # Most choices get no further than those before them.
            if best == n or path(start, best + 1) > budget or not fits(start, best + 1):
                continue
            last = bisect_left(ends, True, best + 1, key=lambda k: not fits(start, k)) - 1
            best = bisect_right(ends, budget, best + 1, last + 1, key=lambda k: path(start, k)) - 1
        return best

    def _first(self, stage: int, end: int, budget: float) -> int:
        """Return where a stage up to a block may start at the earliest, under any choice."""
        best = end
        for choice in range(len(self._own)):
            path, fits = self._path(stage, choice), self._fits(stage, choice)
            if best == 0 or path(best - 1, end) > budget or not fits(best - 1, end):
                continue
            best = bisect_left(
                range(best), True, key=lambda j: fits(j, end) and path(j, end) <= budget
            )
        return best

    def _path(self, stage: int, choice: int) -> Path:
        """Return what no path of a stage under a choice is shorter than."""
        problem, m = self._problem, self._problem.num_microbatches
        forward, backward, weight = self._forward, self._backward, self._weight
        own = self._own[choice]
        arrives = problem.start_s + problem.least_hop * stage
        returns = problem.least_back_hop * stage
        late = problem.late_weights(stage)
        waits = problem.order.round_trips is RoundTrips.FIRST_AND_LAST
        warmup = problem.order.warmup[stage] if waits else 1
        between, waits_twice = min(warmup, m) - 1, m > warmup
        out = (problem.least_hop + problem.least_back_hop) * (problem.num_stages - 1 - stage)
        way_on = forward[-1] + backward[-1] - weight[-1] + out

        def path(start: int, end: int) -> float:
            f, b = forward[end] - forward[start], own[end] - own[start]
            back = returns + backward[start] - weight[end] - late * (weight[end] - weight[start])
            seconds = arrives + forward[start] + m * (f + b) + max(0.0, back)
            if waits:
                after = way_on - forward[end] - backward[end] + weight[end]
                first, last = max(0.0, after - between * f), max(0.0, after - between * b)
                seconds += first + last if waits_twice else max(first, last)
            return seconds

        return path

    def _fits(self, stage: int, choice: int) -> Callable[[int, int], bool]:
        """Return whether a stage's run may fit the memory under a choice: False is certain."""
        needs = self._problem.needs
        if needs is None:
            return lambda start, end: True
        kept, params = needs.kept_bytes[choice], needs.param_bytes
        lines = needs.lines(self._problem.in_flight[stage])

        def fits(start: int, end: int) -> bool:
            held, sizes = kept[end] - kept[start], params[end] - params[start]
            return all(live * held + slope * sizes <= room for live, slope, room in lines)

        return fits
