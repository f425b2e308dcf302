"""The chain problem of stages that choose a mesh: choices are those of the first mesh, and so on.

`before` and `after` of a path are taken over the fastest mesh of each block, and a transfer over
the cheapest, so the value stays a lower bound; the tail of stage 0 enters the paths of all others,
so each of its meshes is a problem of its own (`by_first_mesh`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from search.partition.chain_problem import (
    ChainProblem,
    CostWindow,
    Flags,
    Floats,
    Indices,
    RankLimit,
    Stages,
    StageView,
)
from search.partition.chain_windows import Part, Window


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedCostWindow:
    """A cost window whose choices are those of the first member, then of the second, and so on.

    With `shares_tail` a run's tail is the shortest of all members'.
    """

    windows: tuple[CostWindow, ...]
    limits: tuple[float, ...]
    """Bytes of a device of each member."""
    shares_tail: bool

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds, by choice."""
        return np.concatenate([window.forward_s for window in self.windows])

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds after the last job, by choice unless it is shared."""
        # The tail of stage 0 enters all paths: the shortest of any mesh keeps the value a bound.
        if self.shares_tail:
            return np.min([window.tail_s for window in self.windows], axis=0)
        return np.concatenate(
            [np.broadcast_to(window.tail_s, window.forward_s.shape) for window in self.windows]
        )

    @cached_property
    def copies_s(self) -> tuple[Floats, Floats]:
        """Seconds of copies to the host and back."""
        down, up = zip(*(window.copies_s for window in self.windows), strict=True)
        return np.concatenate(down), np.concatenate(up)

    def least_bytes(self, in_flight: int, choice: int) -> Floats:
        """Least bytes of a rank that holds each run."""
        member, own = divmod(choice, self._kinds)
        return self.windows[member].least_bytes(in_flight, own)

    def on_rank(self, rank: RankLimit, part: Part) -> tuple[Floats, Flags]:
        """Return backward seconds of a part's runs, by choice, and whether each may fit."""
        found = []
        for member, window in enumerate(self.windows):
            # A member's window numbers its own choices from 0.
            own = tuple(
                replace(known, choice=known.choice - member * self._kinds)
                for known in rank.infeasible
                if known.choice // self._kinds == member
            )
            own_rank = replace(rank, infeasible=own, limit_bytes=self.limits[member])
            found.append(window.on_rank(own_rank, part))
        backward_s, fits = zip(*found, strict=True)
        return np.concatenate(backward_s), np.concatenate(fits)

    def until(self, rank: RankLimit, choice: int, part: Part) -> Indices:
        """Return 0: stages with meshes of their own recompute all blocks alike."""
        return np.zeros(self.forward_s.shape[1:], dtype=np.intp)[part]

    @property
    def _kinds(self) -> int:
        return len(self.windows[0].forward_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedStages:
    """`chain_problem.Stages` whose stages may each be any member's."""

    members: tuple[Stages, ...]
    limits: tuple[float, ...]
    """Bytes of a device of each member."""
    starts_s: tuple[float, ...]
    """The least seconds of loading the batch where each member has stage 0."""
    shares_tail: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.members[0].num_blocks

    def cost_window(self, window: Window) -> MixedCostWindow:
        """Return the costs of every run of a window."""
        return self._mixed(tuple(stages.cost_window(window) for stages in self.members))

    def costs_of(self, start: Indices, end: Indices) -> MixedCostWindow:
        """Return the costs of these runs."""
        return self._mixed(tuple(stages.costs_of(start, end) for stages in self.members))

    def _mixed(self, windows: tuple[CostWindow, ...]) -> MixedCostWindow:
        return MixedCostWindow(windows=windows, limits=self.limits, shares_tail=self.shares_tail)


def mixed_problem(
    problems: Sequence[ChainProblem], members_of_stage: Sequence[Sequence[int]] = ()
) -> ChainProblem:
    """Return the problem of mixing members' problems where each run has the shortest tail of all;
    `members_of_stage` are those (indices) that each stage may be of, if not all.

    Its value is no more than those of `by_first_mesh`. The members are of one schedule, so many
    microbatches and stages, and the same kinds of recompute.
    """
    kinds = len(problems[0].choices)
    starts_s = tuple(problem.start_s for problem in problems)
    of_first = members_of_stage[0] if members_of_stage else range(len(problems))
    return replace(
        problems[0],
        stages=MixedStages(
            members=tuple(problem.stages for problem in problems),
            limits=tuple(problem.memory_limit_bytes for problem in problems),
            shares_tail=True,
            starts_s=starts_s,
        ),
        stage_choices=tuple(
            tuple(kinds * member + own for member in members for own in range(kinds))
            for members in members_of_stage
        ),
        block_forward_s=np.min([problem.block_forward_s for problem in problems], axis=0),
        block_backward_s=np.min([problem.block_backward_s for problem in problems], axis=0),
        # Taken off paths, so the most of any member is the bound.
        block_weight_s=np.max([problem.block_weight_s for problem in problems], axis=0),
        transfer_s=np.min([problem.transfer_s for problem in problems], axis=0),
        back_transfer_s=np.min([problem.back_transfer_s for problem in problems], axis=0),
        start_s=min(starts_s[at] for at in of_first),
        choices=problems[0].choices * len(problems),
        num_meshes=len(problems),
        # Lines of memory are a member's own: none holds for all.
        needs=None,
        # Members' copies are left out: a bound all the same.
        copied=(),
    )


def stage_views(
    problems: Sequence[ChainProblem],
    members_of_stage: Sequence[Sequence[int]],
    transfers_s: Sequence[Sequence[tuple[Floats, Floats]]],
) -> tuple[StageView, ...]:
    """Return what each stage of a mix is near to, of the members (indices) that it and the others
    may be of; `transfers_s` are the transfers there and back into each stage from the
    stage before, for each of its members.
    """
    forward_s, backward_s, there_s, back_s = [], [], [], []
    for members, transfers in zip(members_of_stage, transfers_s, strict=True):
        forward_s.append(np.min([problems[at].block_forward_s for at in members], axis=0))
        backward_s.append(np.min([problems[at].block_backward_s for at in members], axis=0))
        there_s.append(np.min([there for there, _ in transfers], axis=0))
        back_s.append(np.min([back for _, back in transfers], axis=0))
    # The cheapest transfer into each stage, wherever it starts.
    least = [
        (float(t[1:-1].min()), float(b[1:-1].min())) for t, b in zip(there_s, back_s, strict=True)
    ]

    def sums(of_stages: Sequence[Floats]) -> Floats:
        """Running sums of the least of these stages; nothing of none."""
        if not of_stages:
            return np.zeros(len(forward_s[0]) + 1)
        return np.append(0.0, np.cumsum(np.min(of_stages, axis=0)))

    def totals(transfers: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return sum(there for there, _ in transfers), sum(back for _, back in transfers)

    views = []
    for s in range(len(members_of_stage)):
        later = sums(forward_s[s + 1 :]) + sums(backward_s[s + 1 :])
        views.append(
            StageView(
                before_f=sums(forward_s[:s]),
                before_b=sums(backward_s[:s]),
                after=later[-1] - later,
                transfer_s=there_s[s],
                back_transfer_s=back_s[s],
                # Stage 0 receives nothing, and the transfer
                # into this stage itself is given by its start.
                earlier_transfers_s=totals(least[1:s]),
                # The transfer into the next stage is given by this one's end.
                later_transfers_s=totals(least[s + 2 :]),
            )
        )
    return tuple(views)


def by_first_mesh(problem: ChainProblem) -> list[ChainProblem]:
    """Return a mixed problem with the tails, and the start, as they are, once for each mesh of
    stage 0.
    """
    assert isinstance(problem.stages, MixedStages)
    stages = replace(problem.stages, shares_tail=False)
    kinds = len(problem.choices) // len(stages.members)
    every = tuple(range(len(problem.choices)))
    first, *others = problem.stage_choices or (every,) * problem.num_stages
    # The choices of stage 0, member by member.
    of_member = [first[at : at + kinds] for at in range(0, len(first), kinds)]
    return [
        replace(
            problem,
            stages=stages,
            stage_choices=(own, *others),
            start_s=problem.stages.starts_s[own[0] // kinds],
        )
        for own in of_member
    ]
