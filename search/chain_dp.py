"""Stage boundaries by dynamic programming over the chain of blocks.

Given n blocks in order and S = pp stages (one per pp rank), choose cuts
0 = k_0 < k_1 < ... < k_S = n and a recompute choice c_s for each stage:

    minimise    max over s of  path(s, k_s, k_{s+1}, c_s)
    subject to  peak_bytes(s, k_s, k_{s+1}, c_s) <= memory_limit_bytes

`path` is the length of a chain of jobs that every run of the schedule must pass, one after
the other, so the minimum is a lower bound of the step time. With t = f + b a stage's seconds
per microbatch, m microbatches, and `before`, `after` the seconds that one
microbatch spends in earlier and later stages, hops and both directions included:

    path = forward part of before + m t + wait + end

    wait    any schedule  0
            1F1B          max(0, after - w f) + max(0, after - w b)     (when m > w + 1)
                          with w = in_flight(s) - 1: the first backward returns `after` seconds
                          after the first forward, w more forwards fit in between; the last
                          backward likewise
            FThenB        after
    end     max(backward part of before + tail(stage 0), tail(s))
                          a rank's tail is its gradient sync and optimizer; the last gradient
                          travels back to stage 0, whose tail follows. Where backward is
                          split, weight gradients may come after the last gradient has left,
                          so m/2 b (their most) is taken off the first of the two, and half
                          of `before`

`before` and `after` are sums over blocks, so they depend on the cut alone when all stages make
the same recompute choice; where both are allowed they are taken without recompute, which
keeps the value a lower bound.

Recurrence, from the last stage to the first, for a given first cut k_1 (it sets tail(0)):

    V[S, n] = 0
    V[s, j] = min over k > j, c of  max(V[s+1, k], path(s, j, k, c))      where memory fits

It is exact for the problem above. One pass without tails bounds every k_1 from below, and
only those k_1 are solved whose bound is under the best value so far, usually one or two.

Complexity: O(S n w) array cells a pass, w the longest stage worth looking at: a stage whose
m t alone exceeds the value found cannot be part of a better answer. Stages of a balanced
pipeline hold about n / S blocks, so a chain of 1,000 blocks costs about n^2 cells whatever S
is. Identical blocks are priced once, by class, before they get here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FAMILIES = ("any", "1F1B", "FThenB", "split")
"""What is known of the schedule: nothing, its order of jobs, or that it splits backward."""


class Band(Protocol):
    """All runs of 1 .. w consecutive blocks, by (length - 1, first block).

    Entries whose run would pass the end of the chain hold anything. `forward_s` and
    `backward_s` have a leading axis for the recompute choice.
    """

    @property
    def forward_s(self) -> Floats:
        """Forward seconds."""
        ...

    @property
    def backward_s(self) -> Floats:
        """Backward seconds."""
        ...

    @property
    def tail_s(self) -> Floats:
        """Seconds after the last job."""
        ...

    def peak_bytes(self, in_flight: int, choice: int) -> Floats:
        """Bytes of a rank holding each run with this many microbatches in flight."""
        ...


class Stages(Protocol):
    """What a chain of blocks costs, cut anyhow."""

    @property
    def num_blocks(self) -> int:
        """Length of the chain."""
        ...

    def band(self, width: int) -> Band:
        """Return the costs of every run of at most `width` blocks."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainProblem:
    """One configuration's chain.

    block_forward_s, block_backward_s (n): least seconds of each block, whatever the choice.
    hop_s (n + 1): seconds to send what a stage starting at block i receives (0 at i = 0); the
    gradient costs the same on the way back. in_flight (S): microbatches a stage keeps at most.
    most_blocks: no run of more blocks fits the memory (None: not known).
    """

    stages: Stages
    block_forward_s: Floats
    block_backward_s: Floats
    hop_s: Floats
    in_flight: tuple[int, ...]
    num_microbatches: int
    memory_limit_bytes: float
    family: str = "any"
    choices: tuple[str, ...] = ("none",)
    most_blocks: int | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.stages.num_blocks

    @property
    def num_stages(self) -> int:
        """Number of stages to cut."""
        return len(self.in_flight)

    @property
    def longest(self) -> int:
        """The most blocks a stage can hold."""
        left = self.num_blocks - self.num_stages + 1
        return left if self.most_blocks is None else min(left, self.most_blocks)

    @cached_property
    def before_f(self) -> Floats:
        """Least forward seconds of the blocks before each cut."""
        return np.concatenate([[0.0], np.cumsum(self.block_forward_s)])

    @cached_property
    def before_b(self) -> Floats:
        """Least backward seconds of the blocks before each cut."""
        return np.concatenate([[0.0], np.cumsum(self.block_backward_s)])

    @cached_property
    def least_hop(self) -> float:
        """The cheapest hop anywhere inside the chain."""
        return float(self.hop_s[1:-1].min()) if self.num_blocks > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A solved chain: stage s holds blocks cuts[s] .. cuts[s+1]-1 with choice index choices[s].

    `value` is the bound of the step time (or, from `smallest_peak`, the peak bytes).
    """

    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    value: float


class Paths:
    """`path` of the header for every run of a band, without and with the tails."""

    def __init__(self, problem: ChainProblem, width: int) -> None:
        self.problem = problem
        self.width = width
        self.band = problem.stages.band(width)
        n = problem.num_blocks
        start = np.arange(n)[None, :]
        end = start + np.arange(1, width + 1)[:, None]
        self.valid = end <= n
        self.end = np.minimum(end, n)
        before_f, before_b = problem.before_f, problem.before_b
        after_f, after_b = before_f[-1] - before_f, before_b[-1] - before_b
        self.after = (after_f + after_b)[self.end]
        self.hop_in = problem.hop_s[:n][None, :]
        self.hop_out = problem.hop_s[self.end]
        self._seconds: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._bytes: dict[tuple[int, int], Floats] = {}

    def parts(self, stage: int, choice: int) -> tuple[Floats, Floats]:
        """Return (seconds until the stage's last job ends, backward part of before)."""
        key = (stage, choice)
        if key not in self._seconds:
            self._seconds[key] = self._parts(stage, choice)
        return self._seconds[key]

    def _parts(self, stage: int, choice: int) -> tuple[Floats, Floats]:
        problem = self.problem
        n, m, depth = problem.num_blocks, problem.num_microbatches, problem.num_stages - 1 - stage
        f, b = self.band.forward_s[choice], self.band.backward_s[choice]
        # The hop next to the stage is known; farther ones cost at least the cheapest.
        hops_in = (self.hop_in + max(0, stage - 1) * problem.least_hop) if stage else 0.0
        until = problem.before_f[:n][None, :] + hops_in + m * (f + b)
        if problem.family == "split":
            half = (problem.before_b[:n][None, :] - m * b) / 2
            return until, np.where(stage > 0, half + hops_in, 0.0)
        if depth:
            after = self.after + 2 * (self.hop_out + (depth - 1) * problem.least_hop)
            warmup = problem.in_flight[stage] - 1
            if problem.family == "1F1B" and m > warmup + 1:
                until = until + np.maximum(0.0, after - warmup * f)
                until = until + np.maximum(0.0, after - warmup * b)
            elif problem.family == "FThenB":
                until = until + after
        return until, problem.before_b[:n][None, :] + hops_in

    def own(self, stage: int, choice: int, first_tail: float | None) -> Floats:
        """Path of every run, inf where it does not fit; without tails when first_tail is None."""
        until, back = self.parts(stage, choice)
        if first_tail is None:
            path = until + back
        else:
            path = until + np.maximum(back + first_tail, self.band.tail_s)
        return np.where(self.fits(stage, choice), path, np.inf)

    def peak(self, stage: int, choice: int) -> Floats:
        """Peak bytes of every run on this stage, inf past the end of the chain."""
        key = (self.problem.in_flight[stage], choice)
        if key not in self._bytes:
            self._bytes[key] = np.where(self.valid, self.band.peak_bytes(*key), np.inf)
        return self._bytes[key]

    def fits(self, stage: int, choice: int) -> NDArray[np.bool_]:
        """Whether each run stays within the memory limit."""
        return self.valid & (self.peak(stage, choice) <= self.problem.memory_limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The best cut, if any under the ceiling, and whether any cut at all fits the memory."""

    cut: Cut | None
    fits: bool


def solve_chain(problem: ChainProblem, *, ceiling: float = np.inf) -> Solved:
    """Return the cut with the smallest bound among those of at most `ceiling`.

    Looks at short stages first and widens until the answer proves that no longer stage can
    be in a better one.
    """
    n, stages, longest = problem.num_blocks, problem.num_stages, problem.longest
    if stages > n or longest * stages < n:
        return Solved(cut=None, fits=False)
    width = min(longest, -(-5 * n // (4 * stages)) + 3)
    while True:
        found = _solve_band(problem, Paths(problem, width), ceiling)
        bound = min(ceiling, found.cut.value) if found.cut else ceiling
        needed = _longest_within(problem, bound, longest)
        if needed <= width or width == longest:
            return found
        width = min(longest, needed if found.cut else max(2 * width, min(needed, 4 * width)))


def _longest_within(problem: ChainProblem, bound: float, longest: int) -> int:
    """Return the most blocks a stage may hold with m t <= bound."""
    if not np.isfinite(bound):
        return longest
    least = problem.before_f + problem.before_b
    budget = bound / problem.num_microbatches
    ends = np.searchsorted(least, least + budget * (1 + 1e-12), side="right") - 1
    return int(min(longest, (ends - np.arange(len(least))).max()))


def _solve_band(problem: ChainProblem, paths: Paths, ceiling: float) -> Solved:
    """Solve for each first cut whose bound is under the best found."""
    stages, choices = problem.num_stages, range(len(problem.choices))
    tail = paths.band.tail_s[:, 0]

    def first_stage(first_tail: float | None) -> tuple[Floats, NDArray[np.intp]]:
        own = np.stack([paths.own(0, choice, first_tail)[:, 0] for choice in choices])
        return own.min(axis=0), own.argmin(axis=0)

    if stages == 1:
        if paths.width < problem.num_blocks:
            return Solved(cut=None, fits=False)
        last = problem.num_blocks - 1
        values, picks = first_stage(float(tail[last]))
        value = float(values[last])
        if not np.isfinite(value) or value > ceiling:
            return Solved(cut=None, fits=bool(np.isfinite(value)))
        cut = Cut(cuts=(0, problem.num_blocks), choices=(int(picks[last]),), value=value)
        return Solved(cut=cut, fits=True)

    rest, _ = _sweep(paths, first_tail=None)
    bare, _ = first_stage(None)
    bounds = np.maximum(bare, rest[paths.end[:, 0]]) + tail
    best: Cut | None = None
    for row in np.argsort(bounds, kind="stable"):
        if bounds[row] > ceiling or bounds[row] >= (best.value if best else np.inf):
            break
        first_tail = float(tail[row])
        values, steps = _sweep(paths, first_tail=first_tail)
        own, picks = first_stage(first_tail)
        end = int(paths.end[row, 0])
        value = max(float(own[row]), float(values[end]))
        if value <= ceiling and value < (best.value if best else np.inf):
            best = _read_cut(problem, steps, end, int(picks[row]), value)
    return Solved(cut=best, fits=bool(np.isfinite(bounds).any()))


def _sweep(
    paths: Paths, first_tail: float | None
) -> tuple[Floats, list[tuple[NDArray[np.intp], NDArray[np.intp]]]]:
    """Return V[1, .] of the header and, for stages S-1 .. 1, the best (length row, choice)."""
    problem = paths.problem
    n = problem.num_blocks
    columns = np.arange(n)
    value = np.full(n + 1, np.inf)
    value[n] = 0.0
    steps = []
    for stage in range(problem.num_stages - 1, 0, -1):
        own = np.stack(
            [paths.own(stage, choice, first_tail) for choice in range(len(problem.choices))]
        )
        choice = own.argmin(axis=0)
        total = np.maximum(own.min(axis=0), value[paths.end])
        row = total.argmin(axis=0)
        value = np.append(total[row, columns], np.inf)
        steps.append((row, choice[row, columns]))
    return value, steps


def _read_cut(
    problem: ChainProblem,
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]],
    first_cut: int,
    first_choice: int,
    value: float,
) -> Cut:
    cuts, choices, at = [0, first_cut], [first_choice], first_cut
    for row, choice in reversed(steps):
        choices.append(int(choice[at]))
        at += int(row[at]) + 1
        cuts.append(at)
    return Cut(cuts=tuple(cuts), choices=tuple(choices), value=value)


def smallest_peak(problem: ChainProblem) -> Cut | None:
    """Return the cut whose largest rank needs the fewest bytes, whatever its time."""
    n, stages = problem.num_blocks, problem.num_stages
    if stages > n:
        return None
    width = min(n - stages + 1, -(-3 * n // (2 * stages)) + 4)
    paths = Paths(problem, width)
    columns = np.arange(n)
    value = np.full(n + 1, np.inf)
    value[n] = 0.0
    steps = []
    for stage in range(stages - 1, -1, -1):
        peaks = np.stack([paths.peak(stage, choice) for choice in range(len(problem.choices))])
        choice = peaks.argmin(axis=0)
        total = np.maximum(peaks.min(axis=0), value[paths.end])
        row = total.argmin(axis=0)
        value = np.append(total[row, columns], np.inf)
        steps.append((row, choice[row, columns]))
    if not np.isfinite(value[0]):
        return None
    row, choice = steps.pop()
    return _read_cut(problem, steps, int(row[0]) + 1, int(choice[0]), float(value[0]))


def cut_value(paths: Paths, cuts: Sequence[int], choices: Sequence[int]) -> float:
    """Return the bound of one given cut, or infinity when a stage does not fit.

    `paths` must be wide enough for the longest stage.
    """
    first_tail = float(paths.band.tail_s[cuts[1] - 1, 0])
    worst = 0.0
    for stage, choice in enumerate(choices):
        first, end = cuts[stage], cuts[stage + 1]
        worst = max(worst, float(paths.own(stage, choice, first_tail)[end - first - 1, first]))
    return worst


def cut_peak(paths: Paths, cuts: Sequence[int], choices: Sequence[int]) -> float:
    """Return the bytes of the rank that needs most under one given cut."""
    return max(
        float(paths.peak(stage, choice)[cuts[stage + 1] - cuts[stage] - 1, cuts[stage]])
        for stage, choice in enumerate(choices)
    )
