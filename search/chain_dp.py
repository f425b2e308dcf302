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

It is exact for the problem above. One pass without tails bounds every k_1 from below, a pass
with one k_1's tail bounds all with longer tails, and only those k_1 are solved whose bound is
under the best value so far, usually one or two.

Complexity. A stage whose m t alone exceeds the value found cannot be part of a better answer,
so stages hold at most w blocks, w little more than n / S. Stage s then starts at one of the
S w - n blocks or so that leave both sides enough room (`Window`), and a pass looks at
O(S w (S w - n)) runs: a few for two stages of a thousand blocks, about n^2 / 10 for many.
Identical blocks are priced once, by class, before they get here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import gt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FAMILIES = ("any", "1F1B", "FThenB", "split")
"""What is known of the schedule: nothing, its order of jobs, or that it splits backward."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The runs that one stage may hold: starts and ends within bounds, of so many blocks.

    Arrays have a column for each start. Rows are ends, or lengths where those are fewer.
    """

    first_start: int
    last_start: int
    first_end: int
    last_end: int
    width: int
    shortest: int = 1

    @classmethod
    def all_runs(cls, num_blocks: int, width: int) -> Window:
        """Return every run of at most `width` blocks, by (length - 1, first block)."""
        return cls(
            first_start=0,
            last_start=num_blocks - 1,
            first_end=1,
            last_end=num_blocks,
            width=width,
        )

    @cached_property
    def start(self) -> NDArray[np.intp]:
        """First block of each column (1, columns)."""
        return np.arange(self.first_start, self.last_start + 1)[None, :]

    @cached_property
    def _wanted(self) -> NDArray[np.intp]:
        by_end = self.last_end - self.first_end < self.width - self.shortest
        if by_end:
            ends = np.arange(self.first_end, self.last_end + 1)[:, None]
            return np.broadcast_to(ends, (len(ends), self.start.shape[1]))
        return self.start + np.arange(self.shortest, self.width + 1)[:, None]

    @cached_property
    def end(self) -> NDArray[np.intp]:
        """The block after each run (rows, columns); of those that are not valid, some other."""
        return np.clip(self._wanted, self.start + 1, self.last_end)

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """Which entries are runs of the window."""
        length = self.end - self.start
        return (
            (self._wanted == self.end)
            & (self.end >= self.first_end)
            & (length >= self.shortest)
            & (length <= self.width)
        )


def stage_windows(reach: NDArray[np.intp], num_stages: int) -> tuple[Window, ...] | None:
    """Return the runs that leave the other stages enough blocks, and not too many.

    reach[i] (n + 1, never falling) is where a stage that starts at block i ends at the latest.
    None where no cut of so many stages is left.
    """
    n = len(reach) - 1
    latest, earliest = [0], [n]
    for stage in range(num_stages):
        latest.append(min(n - (num_stages - stage - 1), int(reach[latest[-1]])))
        earliest.append(
            max(num_stages - stage - 1, int(np.searchsorted(reach, earliest[-1], side="left")))
        )
    earliest.reverse()
    if earliest[0] > 0 or latest[-1] < n or any(map(gt, earliest, latest)):
        return None
    return tuple(
        Window(
            first_start=earliest[s],
            last_start=latest[s],
            first_end=earliest[s + 1],
            last_end=latest[s + 1],
            width=int(
                (reach[earliest[s] : latest[s] + 1] - np.arange(earliest[s], latest[s] + 1)).max()
            ),
        )
        for s in range(num_stages)
    )


def even_reach(num_blocks: int, width: int) -> NDArray[np.intp]:
    """Return `reach` of stages of at most `width` blocks."""
    return np.minimum(num_blocks, np.arange(num_blocks + 1) + width)


def fixed_windows(cuts: Sequence[int]) -> tuple[Window, ...]:
    """Return the one run of each stage between given cuts."""
    return tuple(
        Window(first_start=a, last_start=a, first_end=b, last_end=b, width=b - a)
        for a, b in pairwise(cuts)
    )


class Band(Protocol):
    """The costs of a window's runs, in its shape; of those that are not valid, anything.

    `forward_s` and `backward_s` have a leading axis for the recompute choice.
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

    def band(self, window: Window) -> Band:
        """Return the costs of every run of a window."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainProblem:
    """One configuration's chain.

    block_forward_s, block_backward_s (n): least seconds of each block, whatever the choice.
    hop_s (n + 1): seconds to send what a stage starting at block i receives (0 at i = 0); the
    gradient costs the same on the way back. in_flight (S): microbatches a stage keeps at most.
    most_blocks: no run of more blocks fits the memory (None: not known). cuts: stage boundaries
    that are fixed, so that recompute alone is chosen (empty: free).
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
    cuts: tuple[int, ...] = ()

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
    """`path` of the header for every run of a window, without and with the tails."""

    def __init__(self, problem: ChainProblem, window: Window) -> None:
        self.problem = problem
        self.window = window
        self.band = problem.stages.band(window)
        self.end = window.end
        start = window.start[0]
        before_f, before_b = problem.before_f, problem.before_b
        self.before_f, self.before_b = before_f[start][None, :], before_b[start][None, :]
        after = before_f[-1] - before_f + before_b[-1] - before_b
        self.after = after[self.end]
        self.hop_in = problem.hop_s[start][None, :]
        self.hop_out = problem.hop_s[self.end]
        self._seconds: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._bytes: dict[tuple[int, int], Floats] = {}

    @classmethod
    def of_all(cls, problem: ChainProblem, width: int | None = None) -> Paths:
        """Return the paths of every run of at most `width` blocks, by (length - 1, first)."""
        n = problem.num_blocks
        return cls(problem, Window.all_runs(n, width or n))

    def parts(self, stage: int, choice: int) -> tuple[Floats, Floats]:
        """Return (seconds until the stage's last job ends, backward part of before)."""
        key = (stage, choice)
        if key not in self._seconds:
            self._seconds[key] = self._parts(stage, choice)
        return self._seconds[key]

    def _parts(self, stage: int, choice: int) -> tuple[Floats, Floats]:
        problem = self.problem
        m, depth = problem.num_microbatches, problem.num_stages - 1 - stage
        f, b = self.band.forward_s[choice], self.band.backward_s[choice]
        # The hop next to the stage is known; farther ones cost at least the cheapest.
        hops_in = (self.hop_in + max(0, stage - 1) * problem.least_hop) if stage else 0.0
        until = self.before_f + hops_in + m * (f + b)
        if problem.family == "split":
            half = (self.before_b - m * b) / 2
            return until, np.where(stage > 0, half + hops_in, 0.0)
        if depth:
            after = self.after + 2 * (self.hop_out + (depth - 1) * problem.least_hop)
            warmup = problem.in_flight[stage] - 1
            if problem.family == "1F1B" and m > warmup + 1:
                until = until + np.maximum(0.0, after - warmup * f)
                until = until + np.maximum(0.0, after - warmup * b)
            elif problem.family == "FThenB":
                until = until + after
        return until, self.before_b + hops_in

    def own(self, stage: int, choice: int, first_tail: float | None) -> Floats:
        """Path of every run, inf where it does not fit; without tails when first_tail is None."""
        until, back = self.parts(stage, choice)
        if first_tail is None:
            path = until + back
        else:
            path = until + np.maximum(back + first_tail, self.band.tail_s)
        return np.where(self.fits(stage, choice), path, np.inf)

    def peak(self, stage: int, choice: int) -> Floats:
        """Peak bytes of every run on this stage, inf where there is none."""
        key = (self.problem.in_flight[stage], choice)
        if key not in self._bytes:
            self._bytes[key] = np.where(self.window.valid, self.band.peak_bytes(*key), np.inf)
        return self._bytes[key]

    def fits(self, stage: int, choice: int) -> NDArray[np.bool_]:
        """Whether each run stays within the memory limit."""
        return self.window.valid & (self.peak(stage, choice) <= self.problem.memory_limit_bytes)


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
    if problem.cuts:
        return _solve_within(problem, fixed_windows(problem.cuts), ceiling)
    if stages > n or longest * stages < n:
        return Solved(cut=None, fits=False)
    width = min(longest, -(-11 * n // (10 * stages)) + 3)
    reach = even_reach(n, width)
    while True:
        found = _solve_within(problem, stage_windows(reach, stages), ceiling)
        bound = min(ceiling, found.cut.value) if found.cut else ceiling
        needed = _longest_within(problem, bound, longest)
        if needed <= width or width == longest:
            return found
        proved = bool(np.isfinite(bound))
        width = needed if proved else min(longest, max(2 * width, min(needed, 4 * width)))
        reach = np.minimum(even_reach(n, width), _reach_within(problem, bound))
        if proved:
            return _better(found, _solve_within(problem, stage_windows(reach, stages), bound))


def _better(one: Solved, other: Solved) -> Solved:
    cut = min((s.cut for s in (one, other) if s.cut), key=lambda cut: cut.value, default=None)
    return Solved(cut=cut, fits=one.fits or other.fits)


def _reach_within(problem: ChainProblem, bound: float) -> NDArray[np.intp]:
    """Return where a stage from each block on must end to have before + m t <= bound."""
    if not np.isfinite(bound):
        return np.full(problem.num_blocks + 1, problem.num_blocks)
    least = problem.num_microbatches * (problem.before_f + problem.before_b)
    budget = bound * (1 + 1e-12) - problem.before_f
    return np.searchsorted(least, least + budget, side="right") - 1


def _longest_within(problem: ChainProblem, bound: float, longest: int) -> int:
    """Return the most blocks a stage may hold with m t + tail <= bound."""
    if not np.isfinite(bound):
        return longest
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if least_with(problem, middle) <= bound * (1 + 1e-12):
            low = middle
        else:
            high = middle - 1
    return low


def least_with(problem: ChainProblem, num_blocks: int) -> float:
    """Return a time that no stage of so many blocks, or more, can beat: m t + tail."""
    n = problem.num_blocks
    window = Window(
        first_start=0,
        last_start=n - num_blocks,
        first_end=num_blocks,
        last_end=n,
        width=num_blocks,
        shortest=num_blocks,
    )
    band = problem.stages.band(window)
    seconds = band.forward_s + band.backward_s
    return float((problem.num_microbatches * seconds + band.tail_s).min())


def _solve_within(
    problem: ChainProblem, windows: Sequence[Window] | None, ceiling: float
) -> Solved:
    """Solve for stages of these windows, each first cut whose bound is under the best."""
    choices = range(len(problem.choices))
    if windows is None:
        return Solved(cut=None, fits=False)
    paths = [Paths(problem, window) for window in windows]
    tail, ends = paths[0].band.tail_s[:, 0], paths[0].end[:, 0]

    def first_stage(first_tail: float | None) -> tuple[Floats, NDArray[np.intp]]:
        own = np.stack([paths[0].own(0, choice, first_tail)[:, 0] for choice in choices])
        return own.min(axis=0), own.argmin(axis=0)

    rest, _ = _sweep(paths, first_tail=None)
    bare, _ = first_stage(None)
    bounds = np.maximum(bare, rest[ends]) + tail
    fits = bool(np.isfinite(bounds).any())
    for row in range(len(tail)):
        bounds[row] = max(bounds[row], first_stage(float(tail[row]))[0][row])
    best: Cut | None = None
    sweeps = 0
    while True:
        limit = np.nextafter(best.value, 0) if best else ceiling
        open_rows = np.flatnonzero(np.isfinite(bounds) & (bounds <= min(ceiling, limit)))
        if not len(open_rows):
            return Solved(cut=best, fits=fits)
        # The shortest tail bounds all others; when that is done, the most promising one.
        row = int(open_rows[(tail if sweeps == 0 else bounds)[open_rows].argmin()])
        sweeps += 1
        own, picks = first_stage(float(tail[row]))
        values, steps = _sweep(paths, first_tail=float(tail[row]))
        value = max(float(own[row]), float(values[ends[row]]))
        if value <= ceiling and value < (best.value if best else np.inf):
            best = _read_cut(steps, int(ends[row]), int(picks[row]), value)
        # What a tail costs the stages after, a longer one does too.
        longer = tail >= tail[row]
        bounds[longer] = np.maximum(bounds[longer], values[ends[longer]])
        bounds[row] = np.inf


Step = tuple[int, NDArray[np.intp], NDArray[np.intp]]
"""A stage's first possible start, and from each start on its best end and choice."""


def _sweep(paths: Sequence[Paths], first_tail: float | None) -> tuple[Floats, list[Step]]:
    """Return V[1, .] of the header and the steps of stages S-1 .. 1."""

    def cost(stage: int, choice: int) -> Floats:
        return paths[stage].own(stage, choice, first_tail)

    return _fold(paths, range(len(paths) - 1, 0, -1), cost)


def _fold(
    paths: Sequence[Paths], stages: Sequence[int], cost: Callable[[int, int], Floats]
) -> tuple[Floats, list[Step]]:
    """Minimise the largest cost of the stages, from the last one on."""
    problem = paths[0].problem
    value = np.full(problem.num_blocks + 1, np.inf)
    value[-1] = 0.0
    steps = []
    for stage in stages:
        window = paths[stage].window
        costs = np.stack([cost(stage, choice) for choice in range(len(problem.choices))])
        choice = costs.argmin(axis=0)
        total = np.maximum(costs.min(axis=0), value[window.end])
        row, columns = total.argmin(axis=0), np.arange(total.shape[1])
        value = np.full(problem.num_blocks + 1, np.inf)
        value[window.start[0]] = total[row, columns]
        steps.append((window.first_start, window.end[row, columns], choice[row, columns]))
    return value, steps


def _read_cut(steps: Sequence[Step], first_cut: int, first_choice: int, value: float) -> Cut:
    cuts, choices = [0, first_cut], [first_choice]
    for first_start, ends, choice in reversed(steps):
        column = cuts[-1] - first_start
        choices.append(int(choice[column]))
        cuts.append(int(ends[column]))
    return Cut(cuts=tuple(cuts), choices=tuple(choices), value=value)


def smallest_peak(problem: ChainProblem) -> Cut | None:
    """Return the cut whose largest rank needs the fewest bytes, whatever its time."""
    n, stages = problem.num_blocks, problem.num_stages
    if stages > n:
        return None
    width = min(n - stages + 1, -(-3 * n // (2 * stages)) + 4)
    windows: Sequence[Window] | None = (
        fixed_windows(problem.cuts) if problem.cuts else stage_windows(even_reach(n, width), stages)
    )
    assert windows is not None, "stages that hold half as much again as the average cover all"
    paths = [Paths(problem, window) for window in windows]

    def cost(stage: int, choice: int) -> Floats:
        return paths[stage].peak(stage, choice)

    value, steps = _fold(paths, range(stages - 1, -1, -1), cost)
    if not np.isfinite(value[0]):
        return None
    _, ends, choice = steps.pop()
    return _read_cut(steps, int(ends[0]), int(choice[0]), float(value[0]))


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
