"""Stage boundaries by dynamic programming over the chain of blocks.

Given n blocks in order and S = pp stages (one per pp rank), choose cuts
0 = k_0 < k_1 < ... < k_S = n and a recompute choice c_s for each stage:

    minimise    max over s of  path(s, k_s, k_{s+1}, c_s)
    subject to  memory(s, k_s, k_{s+1}, c_s) <= memory_limit_bytes

`path` is the length of a chain of jobs that every run of the schedule must pass, one after
the other, so the minimum is a lower bound of the step time. With t = f + b a stage's seconds
per microbatch, m microbatches, and `before`, `after` the seconds one microbatch spends in
earlier and later stages (hops included), both directions:

    any schedule   before + m t
    1F1B           before + m t + max(0, after - d f) + max(0, after - d b)     d = S - 1 - s
                   (the first backward returns `after` seconds after the first forward, d more
                   forwards fit in between; the last backward likewise)
    FThenB         before + m t + after

and where the stage's own tail (gradient sync, optimizer) is longer than the backward part of
`before`, it takes that part's place. `before` and `after` are sums over blocks, so they
depend on the cut alone when all stages make the same recompute choice; when both are allowed
they are taken without recompute, which keeps the value a lower bound.

Recurrence, exact for the problem above:

    V[0, 0] = 0
    V[s+1, k] = min over j < k, c of  max(V[s, j], path(s, j, k, c))      where memory fits

Complexity: O(S n w) time and O(n w) space, w the longest stage worth looking at: a stage whose
m t alone exceeds the value found cannot be part of a better answer. Stages of a balanced
pipeline hold about n / S blocks, so a chain of 1,000 blocks costs about n^2 array cells
whatever S is. Identical blocks are priced once, by class, before they get here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FAMILIES = ("any", "1F1B", "FThenB")


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainProblem:
    """One configuration's numbers. First axis of 2-d arrays: recompute choice; last: block.

    forward_s, backward_s (c, n): seconds per microbatch, recompute included in backward.
    saved_bytes (c, n): kept per microbatch in flight. working_bytes (c, n): transient peak
    while the block runs; a stage's is the largest of its blocks.
    stage_saved_bytes (c, n): kept once per microbatch in flight by a stage starting at block i
    (its input). resident_bytes (n): weights, gradients and optimizer state, always held.
    hop_s (n): one transfer of block i's output to the next stage; the gradient costs the same.
    tail_s (n): seconds of gradient sync and optimizer that block i adds to its rank after the
    last backward. in_flight (S): microbatches a stage keeps at most.
    ties: (i, j, num_bytes): blocks i < j share a parameter, so a stage with both holds
    num_bytes less than the sum says.
    """

    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    working_bytes: Floats
    stage_saved_bytes: Floats
    resident_bytes: Floats
    hop_s: Floats
    tail_s: Floats
    fixed_bytes: float
    in_flight: tuple[int, ...]
    num_microbatches: int
    memory_limit_bytes: float
    family: str = "any"
    ties: tuple[tuple[int, int, float], ...] = ()
    choices: tuple[str, ...] = ("none",)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.forward_s.shape[1]

    @property
    def num_stages(self) -> int:
        """Number of stages to cut."""
        return len(self.in_flight)

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """Running sums with a leading zero, so a slice j:k sums to S[k] - S[j]."""
        names = ("forward_s", "backward_s", "saved_bytes", "resident_bytes", "hop_s", "tail_s")
        result = {}
        for name in names:
            values = getattr(self, name)
            zero = np.zeros((*values.shape[:-1], 1))
            result[name] = np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A solved chain: stage s holds blocks cuts[s] .. cuts[s+1]-1 with choice index choices[s].

    `value` is the bound of the step time (or, from `smallest_peak`, the peak bytes).
    """

    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    value: float


def stage_bytes(problem: ChainProblem, stage: int, first: int, end: int, choice: int) -> float:
    """Return the peak bytes of a rank whose stage holds blocks first..end-1."""
    sums = problem.sums
    held = problem.in_flight[stage] * (
        sums["saved_bytes"][choice, end]
        - sums["saved_bytes"][choice, first]
        + problem.stage_saved_bytes[choice, first]
    )
    tied = sum(size for i, j, size in problem.ties if first <= i and j < end)
    resident = sums["resident_bytes"][end] - sums["resident_bytes"][first] - tied
    working = problem.working_bytes[choice, first:end].max()
    return float(problem.fixed_bytes + resident + held + working)


def stage_path(problem: ChainProblem, stage: int, first: int, end: int, choice: int) -> float:
    """Return `path` of the header for one stage."""
    window = _Window(problem, np.array([first]), np.array([end]), with_bytes=False)
    return float(window.path(stage, choice)[0])


class _Window:
    """Quantities of many candidate stages at once: blocks start[i] .. end[i]-1."""

    def __init__(
        self, problem: ChainProblem, start: NDArray, end: NDArray, *, with_bytes: bool = True
    ) -> None:
        self.problem = problem
        sums = problem.sums

        def over(name: str) -> Floats:
            return sums[name][..., end] - sums[name][..., start]

        self.forward = over("forward_s")
        self.backward = over("backward_s")
        self.tail = over("tail_s")
        # With one choice allowed, others run the same one; with several, none is the least.
        least_f = sums["forward_s"].min(axis=0)
        least_b = sums["backward_s"].min(axis=0)
        self.before_f = least_f[start]
        self.before_b = least_b[start]
        self.after = least_f[-1] - least_f[end] + least_b[-1] - least_b[end]
        self.hop_in = np.where(start > 0, problem.hop_s[np.maximum(start - 1, 0)], 0.0)
        last = problem.num_blocks
        self.hop_out = np.where(end < last, problem.hop_s[np.minimum(end, last) - 1], 0.0)
        self.least_hop = float(problem.hop_s[:-1].min()) if last > 1 else 0.0
        if with_bytes:
            self.saved = over("saved_bytes") + problem.stage_saved_bytes[:, start]
            self.resident = over("resident_bytes")
            for i, j, size in problem.ties:
                self.resident = self.resident - size * ((start <= i) & (end > j))

    def path(self, stage: int, choice: int) -> Floats:
        """Seconds of the header's path for every candidate."""
        problem = self.problem
        m, depth = problem.num_microbatches, problem.num_stages - 1 - stage
        f, b = self.forward[choice], self.backward[choice]
        # The hop next to the stage is known; farther ones are at least the smallest.
        hops_in = self.hop_in + max(0, stage - 1) * self.least_hop
        hops_out = 2 * (self.hop_out + max(0, depth - 1) * self.least_hop)
        drain = np.maximum(self.before_b + hops_in, self.tail)
        path = self.before_f + hops_in + m * (f + b) + drain
        if depth and problem.family == "1F1B" and m > depth:
            after = self.after + hops_out
            path = path + np.maximum(0.0, after - depth * f) + np.maximum(0.0, after - depth * b)
        elif depth and problem.family == "FThenB":
            path = path + self.after + hops_out
        return path

    def peak(self, stage: int, choice: int, working: Floats) -> Floats:
        """Peak bytes of every candidate."""
        problem = self.problem
        held = problem.in_flight[stage] * self.saved[choice]
        return problem.fixed_bytes + self.resident + held + working


class _Band:
    """All candidate stages of at most `width` blocks, as (width, n + 1) arrays by (length, end)."""

    def __init__(self, problem: ChainProblem, width: int) -> None:
        n = problem.num_blocks
        end = np.arange(n + 1)[None, :]
        length = np.arange(1, width + 1)[:, None]
        start = end - length
        self.valid = start >= 0
        self.start = np.maximum(start, 0)
        self.window = _Window(problem, self.start, np.broadcast_to(end, start.shape))
        self.working = _running_max(problem.working_bytes, width)


def _running_max(values: Floats, width: int) -> Floats:
    """Return (c, width, n+1): the largest of the `length` values ending before `end`."""
    choices, n = values.shape
    result = np.zeros((choices, width, n + 1))
    result[:, 0, 1:] = values
    for length in range(1, width):
        result[:, length, length + 1 :] = np.maximum(
            result[:, length - 1, length:-1], values[:, length:]
        )
        result[:, length, : length + 1] = result[:, length - 1, : length + 1]
    return result


def solve_chain(problem: ChainProblem, *, ceiling: float = np.inf) -> Cut | None:
    """Return the cut with the smallest bound, or None when none fits under `ceiling`.

    Looks at short stages first and widens until the answer proves that no longer stage can
    be in a better one.
    """
    n, stages = problem.num_blocks, problem.num_stages
    if stages > n:
        return None
    longest = n - stages + 1
    width = min(longest, max(4, -(-2 * n // stages)))
    while True:
        found = _solve_band(problem, _Band(problem, width), ceiling=ceiling, objective="time")
        bound = min(ceiling, found.value) if found else ceiling
        needed = _longest_within(problem, bound, longest)
        if needed <= width or width == longest:
            return found
        width = min(longest, max(needed, width) if found else 4 * width)


def smallest_peak(problem: ChainProblem) -> Cut | None:
    """Return the cut whose largest rank needs the fewest bytes, whatever its time."""
    n, stages = problem.num_blocks, problem.num_stages
    if stages > n:
        return None
    return _solve_band(problem, _Band(problem, n - stages + 1), ceiling=np.inf, objective="bytes")


def _longest_within(problem: ChainProblem, bound: float, longest: int) -> int:
    """Return the most blocks a stage may hold with m t <= bound."""
    if not np.isfinite(bound):
        return longest
    least = problem.sums["forward_s"].min(axis=0) + problem.sums["backward_s"].min(axis=0)
    budget = bound / problem.num_microbatches
    ends = np.searchsorted(least, least + budget * (1 + 1e-12), side="right") - 1
    return int(min(longest, (ends - np.arange(len(least))).max()))


def _solve_band(
    problem: ChainProblem, band: _Band, *, ceiling: float, objective: str
) -> Cut | None:
    n, num_choices = problem.num_blocks, len(problem.choices)
    value = np.full(n + 1, np.inf)
    value[0] = 0.0
    steps: list[tuple[NDArray, NDArray]] = []
    for stage in range(problem.num_stages):
        best = np.full(n + 1, np.inf)
        best_start = np.zeros(n + 1, dtype=np.int64)
        best_choice = np.zeros(n + 1, dtype=np.int64)
        for choice in range(num_choices):
            peak = band.window.peak(stage, choice, band.working[choice])
            fits = band.valid & (peak <= problem.memory_limit_bytes)
            if objective == "bytes":
                own, fits = peak, band.valid
            else:
                own = band.window.path(stage, choice)
            total = np.where(fits, np.maximum(value[band.start], own), np.inf)
            row = total.argmin(axis=0)
            candidate = total[row, np.arange(n + 1)]
            better = candidate < best
            best = np.where(better, candidate, best)
            best_start = np.where(better, np.arange(n + 1) - row - 1, best_start)
            best_choice = np.where(better, choice, best_choice)
        best[best > ceiling] = np.inf
        if not np.isfinite(best).any():
            return None
        steps.append((best_start, best_choice))
        value = best
    if not np.isfinite(value[n]):
        return None
    cuts, choices, end = [n], [], n
    for best_start, best_choice in reversed(steps):
        choices.append(int(best_choice[end]))
        end = int(best_start[end])
        cuts.append(end)
    return Cut(cuts=tuple(reversed(cuts)), choices=tuple(reversed(choices)), value=float(value[n]))


def cut_value(problem: ChainProblem, cuts: Sequence[int], choices: Sequence[int]) -> float:
    """Return the bound of one given cut, or infinity when a stage does not fit."""
    worst = 0.0
    for stage, choice in enumerate(choices):
        first, end = cuts[stage], cuts[stage + 1]
        if stage_bytes(problem, stage, first, end, choice) > problem.memory_limit_bytes:
            return float("inf")
        worst = max(worst, stage_path(problem, stage, first, end, choice))
    return worst
