"""The `path` of each stage that a chain may be cut into (`chain_problem`).

`path` is the length of a chain of jobs that every run of the schedule must pass, one after the
other. With t = f + b a stage's seconds per microbatch, m microbatches, and `before`, `after`
the seconds that one microbatch spends in earlier and later stages, transfers and both directions
included, and `start` what is loaded before the first job:

    path = start + forward part of before + m t + wait + end

    wait    by the round trips that the schedule states (`planner.language.schedule.job_order`)
            unknown             0
            first and last      max(0, after - k f) + max(0, after - k b)
                                with k = min(m, warmup(s)) - 1: the first backward returns
                                `after` seconds after the first forward, k more forwards fit in
                                between; the last backward likewise. The larger of the two
                                where all forwards come first (m <= warmup(s))
            after last forward  after
            every               (m - 1) before + m after: one microbatch at a time
    end     max(backward part of before + tail(stage 0), tail(s))
                          a rank's tail is its gradient sync and optimizer; the last gradient
                          travels back to stage 0, whose tail follows. It leaves each stage
                          ahead of the weight gradients `w` there, if any are deferred
                          (`JobSeconds.last_sends_ahead_s`), so w of stages 1 .. s is taken
                          off, and w of later stages off the `after` of the last backward; off
                          the first backward's, w of their first blocks. Where backward is
                          split, no weight gradients are on any way, and they may come after
                          the last gradient has left: those of `late_weights(s)` microbatches
                          where the schedule states that, else all; those of stage s are taken
                          off the first of the two, too

Where activations are copied to the host, m t is what the jobs take with those that copies
lengthen (`copied_jobs`), and k f and k b likewise; other stages' jobs are taken without.

`before` and `after` are sums over blocks, so they depend on the cut alone when all stages make
the same recompute choice; where several are allowed they are taken without recompute, which
keeps the value a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.deadline import check_time
from planner.language.schedule.job_order import RoundTrips
from search.bounds.copied_jobs import extra_s, seconds_by_kind
from search.partition.chain_problem import ChainProblem, Flags, Floats
from search.partition.chain_windows import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns:
    """What one stage may hold: `path` without its end, and what the end is made of.

    Arrays are (choice, row, start): an entry is the run from block `first_start + start` to
    `end[row, start]`.
    """

    first_start: int
    """Block at which the runs of column 0 start."""
    last_start: int
    """Block at which the runs of the last column start."""
    end: NDArray[np.intp]
    """(row, start) The block after each run."""
    until: Floats
    """Seconds until the stage's last job ends; inf where there is no run or it does not fit."""
    back: Floats
    """Seconds from then until the last gradient is at stage 0 and that makes its own, less all
    weight gradients up to the run's end, of which stage 0's are in its tail."""
    tail: Floats
    """Seconds after the stage's last job: gradient sync and optimizer."""

    def own(self, first_tail: float | None) -> Floats:
        """Path of every run, inf where it does not fit; without tails when first_tail is None."""
        # Tails are not negative, so this is below the path under any tail of stage 0.
        if first_tail is None:
            return self.until + self.back
        return self.until + np.maximum(self.back + first_tail, self.tail)

    def own_from(self, start: int, first_tail: float) -> Floats:
        """Return `own` (choice, row) of the runs from one block on."""
        column = start - self.first_start
        back, tail = (
            np.broadcast_to(values, self.until.shape) for values in (self.back, self.tail)
        )
        ends = np.maximum(back[:, :, column] + first_tail, tail[:, :, column])
        return self.until[:, :, column] + ends


_CELLS_BEFORE_COSTS = 10_000
"""How many runs can be priced in the time it takes to begin."""


class Paths:
    """`path` of the header for every run of a window, on any stage."""

    def __init__(self, problem: ChainProblem, window: Window) -> None:
        self.problem = problem
        self.window = window
        self.costs = problem.stages.cost_window(window)
        self.end = window.end
        may_cut = problem.may_cut
        self._valid = (
            window.valid & may_cut[window.start] & may_cut[np.minimum(window.end, len(may_cut) - 1)]
        )
        self._on_rank: dict[tuple, tuple[Floats, Flags]] = {}

    @classmethod
    def of_all(cls, problem: ChainProblem, width: int | None = None) -> Paths:
        """Return the paths of every run of at most `width` blocks, by (length - 1, first)."""
        n = problem.num_blocks
        return cls(problem, Window.all_runs(n, width or n))

    def of_stage(
        self,
        stage: int,
        rows: slice = slice(None),
        starts: slice = slice(None),
    ) -> StageRuns:
        """Return these rows and starts of the window as one stage sees them."""
        check_time()
        part = (slice(None), rows, starts)
        start, end = self.window.start[0, starts], self.end[rows, starts]
        b, fits = self.on_rank(stage, (rows, starts))
        f = self.costs.forward_s[part]
        copied: Sequence[Floats | float] = (0.0, 0.0, 0.0)
        if self.problem.copied:
            copied = self._copies_s(stage, part, b)
        until, back = path_parts(self.problem, stage, start, end, f, b, copied)
        return StageRuns(
            first_start=int(start[0]),
            last_start=int(start[-1]),
            end=end,
            # Infinite seconds keep a run out of every minimum.
            until=np.where(fits, until, np.inf),
            back=back,
            tail=self._tail(stage)[..., rows, starts],
        )

    def _copies_s(
        self, stage: int, part: tuple[slice, slice, slice], backward_s: Floats
    ) -> Sequence[Floats]:
        """Return by how much copies lengthen all of a stage's jobs, those between its first forward
        and backward, and those between its last.
        """
        problem = self.problem
        weight: Floats | float = 0.0
        if problem.splits_backward:
            start, end = self.window.start[0, part[2]], self.end[part[1:]]
            weight = problem.before_w[end] - problem.before_w[start]
        job_s = seconds_by_kind(self.costs.forward_s[part], backward_s, weight)
        # A rank has one stage here, so the copies beside its jobs are all of that stage.
        by_stage = {kind: {stage: seconds} for kind, seconds in job_s.items()}
        down, up = ({stage: seconds[part]} for seconds in self.costs.copies_s)
        row = problem.copied[stage]
        return tuple(
            extra_s(jobs, by_stage, down, up) for jobs in (row.whole, row.filling, row.draining)
        )

    def _tail(self, stage: int) -> Floats:
        """Tails of runs on a stage (row, start); of later stages, perhaps by choice before that."""
        tail_s = self.costs.tail_s
        shares = stage > 0 or tail_s.ndim == self.costs.forward_s.ndim - 1
        return tail_s if shares else tail_s[self.problem.stage_choices[0][0]]

    def on_rank(self, stage: int, part: tuple[slice, slice]) -> tuple[Floats, Flags]:
        """Return the backward seconds of each run of a part, by choice, and whether it is the
        fastest choice of its mesh that may stay within the memory limit on a stage.

        Slower choices of the same run are left out: where the estimate finds that the fastest does
        not fit after all, it becomes infeasible, and the next takes its place.
        """
        problem = self.problem
        rank = problem.limit_of(stage)
        # Stages with the same limits, and nothing found infeasible, share an answer.
        key = rank, *((span.start, span.stop) for span in part)
        if key not in self._on_rank:
            backward_s, fits = self.costs.on_rank(rank, part)
            fits = fits & self._valid[part]
            if not problem.copied:  # with less to copy, a longer backward may be the faster one
                fits = fits & _is_fastest(backward_s, fits, problem)
            self._on_rank[key] = backward_s, fits
        backward_s, fits = self._on_rank[key]
        # Stages of a device group, and stage 0 of a given mesh, choose among fewer meshes.
        if problem.stage_choices:
            own = problem.stage_choices[stage]
            fits = fits.copy()
            fits[[choice not in own for choice in range(len(fits))]] = False
        return backward_s, fits

    def least_bytes(self, stage: int, choice: int) -> Floats:
        """Least bytes of every run on this stage, inf where there is none."""
        least = self.costs.least_bytes(self.problem.in_flight[stage], choice)
        return np.where(self._valid, least, np.inf)


def _is_fastest(backward_s: Floats, fits: Flags, problem: ChainProblem) -> Flags:
    """Return whether each choice is the fastest that fits of its mesh's; all choices of a mesh have
    the same forward.
    """
    by_mesh = np.where(fits, backward_s, np.inf)
    # (mesh, choice of the mesh, row, start)
    by_mesh = by_mesh.reshape(problem.num_meshes, -1, *by_mesh.shape[1:])
    choice = np.arange(by_mesh.shape[1]).reshape(1, -1, *(1,) * (by_mesh.ndim - 2))
    flags: Flags = (choice == by_mesh.argmin(axis=1)[:, None]).reshape(fits.shape)
    return flags


def path_parts(
    problem: ChainProblem,
    stage: int,
    start: Any,
    end: Any,
    f: Floats,
    b: Floats,
    copied: Sequence[Floats | float] = (0.0, 0.0, 0.0),
) -> tuple[Floats, Floats]:
    """Return `path` of the header for a stage's runs, in two parts: seconds until the stage's last
    job ends, and from then until the last gradient is at stage 0 (as `StageRuns` has them).

    Runs are from block `start` to `end` (arrays, broadcast), with forward `f` and backward `b`
    seconds of a microbatch. `copied`: by how much copies lengthen all of the stage's jobs, those
    between its first forward and backward, and those between its last.
    """
    # depth: stages after this one, each of which may send its gradient ahead of weight gradients.
    m, depth = problem.num_microbatches, problem.num_stages - 1 - stage
    # A job beside a copy to or from the host ends when the slower of the two does.
    longer, filling, draining = copied
    # The transfer next to the stage is known; farther ones cost at least the cheapest.
    view = problem.views[stage] if problem.views else None
    transfers_in, transfers_back = _transfers_before(problem, stage, start)
    before_f, before_b = (
        (problem.before_f[start], problem.before_b[start])
        if view is None
        else (view.before_f[start], view.before_b[start])
    )
    # The first microbatch fills the pipeline up to here; then the rank has m of them to run.
    until = m * (f + b) + (problem.start_s + before_f + transfers_in) + longer
    # The last gradient leaves each stage before the weight gradients deferred there are made,
    # so only input gradients lie on its way.
    back = before_b + transfers_back - problem.before_w[end]
    if problem.splits_backward:
        # W jobs of earlier microbatches may be run after the last gradient has left, too.
        weight = problem.before_w[end] - problem.before_w[start]
        back = back - problem.late_weights(stage) * weight
    trips = problem.order.round_trips
    if trips is not RoundTrips.UNKNOWN:
        after = problem.after[end] if view is None else view.after[end]
        if depth:
            after = after + _transfers_after(problem, stage, end)
        # What later stages may defer until gradients have left shortens the way back through
        # them: in their last backward all weight gradients, in others those of one block.
        last_ahead = problem.before_w[-1] - problem.before_w[end]
        ahead = np.minimum(last_ahead, depth * problem.most_sent_ahead)
        # The only backward is the last one, or weight gradients have jobs of their own.
        if m == 1 or problem.splits_backward:
            ahead = last_ahead
        if trips is RoundTrips.AFTER_LAST_FORWARD:
            # No job is left between the last forward and the first backward: the whole wait counts.
            until = until + after - ahead
        elif trips is RoundTrips.EVERY:
            # Between two of its microbatches a rank waits for both ends of the pipeline.
            most = (problem.num_stages - 1) * problem.most_sent_ahead
            # The way to the stage and back, less what stages on either side send ahead.
            again = (
                before_f
                + before_b
                + transfers_in
                + transfers_back
                - min(most, problem.before_w[-1])
            )
            # m round trips through the later stages; between them m - 1 through the earlier ones.
            until = until + (m - 1) * again + m * after - last_ahead
        else:
            warmup = problem.order.warmup[stage]
            between = min(warmup, m) - 1
            # Its own warmup forwards fill the first wait, its cooldown backwards the last one.
            first = np.maximum(0.0, after - ahead - between * f - filling)
            last = np.maximum(0.0, after - last_ahead - between * b - draining)
            # With no more microbatches than warmup forwards the two waits are one.
            until = until + (first + last if m > warmup else np.maximum(first, last))
    return until, back


def _transfers_before(problem: ChainProblem, stage: int, start: Any) -> tuple[Any, Any]:
    """Return the least seconds of transfers up to a stage that starts at these blocks, there and
    back.
    """
    if stage == 0:
        return 0.0, 0.0
    if problem.views:
        view = problem.views[stage]
        there_s, back_s = view.earlier_transfers_s
        return view.transfer_s[start] + there_s, view.back_transfer_s[start] + back_s
    # Of the transfers on the way the cut gives the last; the others are at least the cheapest.
    nearer = stage - 1
    return (
        problem.transfer_s[start] + nearer * problem.least_transfer,
        problem.back_transfer_s[start] + nearer * problem.least_back_transfer,
    )


def _transfers_after(problem: ChainProblem, stage: int, end: Any) -> Any:
    """Return the least seconds of transfers after a stage that ends at these blocks, there and
    back.
    """
    if problem.views:
        following = problem.views[stage + 1]
        farther_s = sum(problem.views[stage].later_transfers_s)
        return following.transfer_s[end] + following.back_transfer_s[end] + farther_s
    # Of the transfers after the stage the cut gives the first.
    farther = problem.num_stages - 2 - stage
    transfers_out = problem.transfer_s[end] + farther * problem.least_transfer
    return transfers_out + (problem.back_transfer_s[end] + farther * problem.least_back_transfer)


def runs_by_stage(problem: ChainProblem, windows: Sequence[Window]) -> list[StageRuns]:
    """Return each stage's runs through its window.

    Windows of many stages overlap: then all runs are priced once, and each stage looks at its
    part of them.
    """
    apart = sum(window.num_cells + _CELLS_BEFORE_COSTS for window in windows)
    width = max(window.width for window in windows)
    # Apart, a run that two windows have is priced twice; together, runs that none has are priced.
    if apart <= problem.num_blocks * width:
        return [Paths(problem, window).of_stage(stage) for stage, window in enumerate(windows)]
    paths = Paths.of_all(problem, width)
    return [
        paths.of_stage(
            stage,
            slice(
                # Rows are lengths less 1, from the window's shortest run to
                # its longest. A row may have runs that end outside the
                # window: the next stage has no start there, so V is infinite.
                max(1, window.first_end - window.last_start) - 1,
                min(window.width, window.last_end - window.first_start),
            ),
            slice(window.first_start, window.last_start + 1),
        )
        for stage, window in enumerate(windows)
    ]
