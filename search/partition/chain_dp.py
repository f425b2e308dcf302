"""Stage boundaries by dynamic programming over the chain of blocks.

Given n blocks in order and S = pp stages (one per pp rank), choose cuts
0 = k_0 < k_1 < ... < k_S = n and a recompute choice c_s for each stage:

    minimise    max over s of  path(s, k_s, k_{s+1}, c_s)
    subject to  peak_bytes(s, k_s, k_{s+1}, c_s) <= memory_limit_bytes

`path` (`chain_paths`) is the length of a chain of jobs that every run of the schedule must
pass, one after the other, so the minimum is a lower bound of the step time.

Recurrence, from the last stage to the first, for a given first cut k_1 (it sets tail(0)):

    V[S, n] = 0
    V[s, j] = min over k > j, c of  max(V[s+1, k], path(s, j, k, c))      where memory fits

It is exact for the problem above. One pass without tails bounds every k_1 from below, a pass
with one k_1's tail bounds all with longer tails, and only those k_1 are solved whose bound is
under the best value so far, usually one or two.

Complexity. A stage whose m t alone exceeds the value found, or the ceiling given, cannot be
part of a better answer, so stages hold at most w blocks, w little more than n / S. Stage s then
starts at one of the S w - n blocks or so that leave both sides enough room (`chain_windows`),
and a pass looks at O(S w (S w - n)) runs: a few for two stages of a thousand blocks, about
n^2 / 10 for many. Identical blocks are priced once, by class, before they get here, and runs
that several stages may hold once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.deadline import check_time
from search.partition.chain_paths import Paths, StageRuns, runs_by_stage
from search.partition.chain_problem import ChainProblem, Cut, Floats
from search.partition.chain_reach import possible_starts, reach_within
from search.partition.chain_windows import Window, even_reach, fixed_windows, stage_windows

_AT_ONCE = 1.5
"""How much wider than a first look the last one may be for that to be the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The best cut, if any under the ceiling.

    `fits` is False only where memory is the reason: no cut short enough for the ceiling fits.
    """

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
    if stages > n:
        return Solved(cut=None, fits=False)
    # A tenth more blocks than an even share: most best cuts are within, and prove it.
    width = min(longest, -(-11 * n // (10 * stages)) + 3)
    found = Solved(cut=None, fits=False)
    bound = ceiling
    while True:
        starts = possible_starts(problem, bound)
        if starts is None:
            return found if found.cut else Solved(cut=None, fits=np.isfinite(bound))
        # The widest stage that m t <= bound allows; no wider window can hold a better cut.
        allowed = reach_within(problem, bound)
        needed = min(longest, int((allowed - np.arange(n + 1)).max()))
        if needed <= _AT_ONCE * width:
            width = needed
        # A run ends where both this look's width and the time that the bound leaves allow.
        windows = stage_windows(
            np.minimum(even_reach(n, min(width, needed)), allowed), stages, starts
        )
        if windows is not None:
            found = _better(found, _solve_within(problem, windows, bound))
        elif needed <= width:
            # Too few blocks on each stage, or a block too long: there is no time for any cut.
            return found if found.cut else Solved(cut=None, fits=np.isfinite(bound))
        if needed <= width:
            return found
        if found.cut:
            # No better cut has a stage longer than this one's value leaves time for.
            bound = min(bound, found.cut.value)
            needed = min(longest, int((reach_within(problem, bound) - np.arange(n + 1)).max()))
            if needed <= width:
                return found
        # Under a bound the next look covers every stage of a better cut, and is the last.
        width = needed if np.isfinite(bound) else min(longest, 2 * width)


def _better(first: Solved, second: Solved) -> Solved:
    cut = min((s.cut for s in (first, second) if s.cut), key=lambda cut: cut.value, default=None)
    return Solved(cut=cut, fits=first.fits or second.fits)


def _solve_within(problem: ChainProblem, windows: Sequence[Window], ceiling: float) -> Solved:
    """Solve for stages of these windows, each first cut whose bound is under the best."""
    stage_runs = runs_by_stage(problem, windows)
    # Stage 0 starts at block 0: column 0 has all its runs, a row for each end.
    ends = stage_runs[0].end[:, 0]
    # Rank 0 makes its last weight gradients after the last gradient has come (as far as the
    # schedule states so); then it exchanges and updates.
    tail = stage_runs[0].tail[:, 0] + problem.first_weight_s[ends]

    def first_stage(first_tail: float | None) -> tuple[Floats, NDArray[np.intp]]:
        # (choice, row) The best choice of stage 0 for each end.
        own = stage_runs[0].own(first_tail)
        return own[:, :, 0].min(axis=0), own[:, :, 0].argmin(axis=0)

    # A row is an end of stage 0. Its tail comes after any
    # path, so all rows are bounded by one pass without tails.
    rest, _ = _sweep(problem, stage_runs, first_tail=None)
    bare, _ = first_stage(None)
    bounds = np.maximum(bare, rest[ends]) + tail
    fits = bool(np.isfinite(bounds).any())
    # A first stage's own path is known with its own tail: that of each row at once.
    own = stage_runs[0].until[:, :, 0] + np.maximum(
        np.broadcast_to(stage_runs[0].back, stage_runs[0].until.shape)[:, :, 0] + tail,
        stage_runs[0].tail[:, 0],
    )
    bounds = np.maximum(bounds, own.min(axis=0))
    best: Cut | None = None
    sweeps = 0
    while True:
        # Rows that can only tie with the best cut are not solved.
        limit = np.nextafter(best.value, 0) if best else ceiling
        open_rows = np.flatnonzero(np.isfinite(bounds) & (bounds <= min(ceiling, limit)))
        if not len(open_rows):
            return Solved(cut=best, fits=fits)
        # The shortest tail bounds all others; when that is done, the most promising one.
        row = int(open_rows[(tail if sweeps == 0 else bounds)[open_rows].argmin()])
        sweeps += 1
        first, picks = first_stage(float(tail[row]))
        values, steps = _sweep(problem, stage_runs, first_tail=float(tail[row]))
        # The longer of stage 0's own path and of the longest path after it.
        value = max(float(first[row]), float(values[ends[row]]))
        if value <= ceiling and value < (best.value if best else np.inf):
            best = _read_cut(steps, int(ends[row]), int(picks[row]), value)
        # What a tail costs the stages after, a longer one does too.
        longer = tail >= tail[row]
        bounds[longer] = np.maximum(bounds[longer], values[ends[longer]])
        # Solved exactly: this row is closed.
        bounds[row] = np.inf


Step = tuple[int, NDArray[np.intp], NDArray[np.intp]]
"""A stage's first possible start, and from each start on its best end and choice."""


def _sweep(
    problem: ChainProblem, stage_runs: Sequence[StageRuns], first_tail: float | None
) -> tuple[Floats, list[Step]]:
    """Return V[1, .] of the header and the steps of stages S-1 .. 1."""
    value, steps = _end_of(problem), []
    for runs in reversed(stage_runs[1:]):
        value, step = _fold(runs, runs.own(first_tail), value)
        steps.append(step)
    return value, steps


def chain_values(
    problem: ChainProblem, stage_runs: Sequence[StageRuns], first_tail: float | None
) -> list[Floats]:
    """Return V[s, .] of the header for s = 0 .. S, V[0, .] being none."""
    values = [_end_of(problem)]
    for runs in reversed(stage_runs[1:]):
        values.append(_fold(runs, runs.own(first_tail), values[-1])[0])
    return [np.zeros(0), *reversed(values)]


def _end_of(problem: ChainProblem) -> Floats:
    """Return V[S, .]: nothing is left to do after the last block, and no stage ends before."""
    value = np.full(problem.num_blocks + 1, np.inf)
    value[-1] = 0.0
    return value


def _fold(runs: StageRuns, costs: Floats, value: Floats) -> tuple[Floats, Step]:
    """Put one stage before those that `value` is of, at the least of the largest cost."""
    check_time()
    # (row, start): the better choice of the stage's run, and the best of what follows its end.
    total = np.maximum(costs.min(axis=0), value[runs.end])
    row, columns = total.argmin(axis=0), np.arange(total.shape[1])
    choice = costs[:, row, columns].argmin(axis=0)
    # Blocks outside the stage's window cannot be its start.
    before = np.full(len(value), np.inf)
    before[runs.first_start : runs.last_start + 1] = total[row, columns]
    return before, (runs.first_start, runs.end[row, columns], choice)


def _read_cut(steps: Sequence[Step], first_cut: int, first_choice: int, value: float) -> Cut:
    cuts, choices = [0, first_cut], [first_choice]
    # Forward along the stored minima: each stage's best end is the next stage's start.
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
    # Stages of much more than an even share of blocks need more memory than even ones, as a rule:
    # this answers how little would do, and proves nothing.
    width = problem.longest if problem.starts else -(-3 * n // (2 * stages)) + 4
    width = min(problem.longest, width)
    windows: Sequence[Window] | None = (
        fixed_windows(problem.cuts) if problem.cuts else stage_windows(even_reach(n, width), stages)
    )
    assert windows is not None, "stages that hold half as much again as the average cover all"
    value, steps = _end_of(problem), []
    for stage in range(stages - 1, -1, -1):
        paths = Paths(problem, windows[stage])
        choices = range(len(problem.choices))
        # The recurrence of the header with a rank's least bytes in place of its path.
        needed = np.stack([paths.least_bytes(stage, choice) for choice in choices])
        value, step = _fold(paths.of_stage(stage), needed, value)
        steps.append(step)
    if not np.isfinite(value[0]):
        return None
    _, ends, choice = steps.pop()
    return _read_cut(steps, int(ends[0]), int(choice[0]), float(value[0]))
