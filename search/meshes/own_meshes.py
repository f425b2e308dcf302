"""Stages with meshes of their own: each pp rank cuts its ranks into the dp and tp that suit it.

All pp ranks have equally many ranks, G = dp tp beside cp, and one microbatch is the same B samples
for all of them, so a stage is free to take any tp that divides G and leaves its G / tp replicas
whole samples of B. What it then costs is what it costs in a plan where all stages have that tp (the
estimate prices what arrives by the mesh of who receives it). A chain that may mix G's meshes is
therefore the chain problem (`chain_problem`) with a choice (mesh, recompute) in place of
recompute alone. `before` and `after` there are taken over the fastest mesh of each block, and a
transfer over the cheapest, so the value stays a lower bound; the tail of stage 0 enters the paths
of all others, so each of its meshes is a problem of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.errors import LayoutError
from planner.plan import Plan
from search.branch_and_bound import EvaluatedPlan
from search.candidates import Candidates
from search.partition.chain_problem import (
    ChainProblem,
    CostWindow,
    Cut,
    Flags,
    Floats,
    Indices,
    RankLimit,
    Stages,
)
from search.partition.chain_windows import Part, Window
from search.space.shapes import Configuration, recompute_choices
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One mesh that stages may have: the configuration and table of all stages having it."""

    configuration: Configuration
    table: StageTable

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.configuration.tp

    @property
    def as_held(self) -> Configuration:
        """The configuration as its stages have it: ZeRO shards nothing without replicas."""
        has_replicas = self.configuration.replication.replicas > 1
        return self.configuration if has_replicas else replace(self.configuration, zero=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedCostWindow:
    """A cost window whose choices are those of the first member, then of the second, and so on.

    With `shares_tail` a run's tail is the shortest of all members'.
    """

    windows: tuple[CostWindow, ...]
    shares_tail: bool

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds, by choice."""
        return np.concatenate([window.forward_s for window in self.windows])

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds after the last job, by choice unless it is shared."""
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

    def peak_bytes(self, in_flight: int, choice: int) -> Floats:
        """About the bytes of a rank holding each run."""
        member, own = divmod(choice, self._kinds)
        return self.windows[member].peak_bytes(in_flight, own)

    def on_rank(self, rank: RankLimit, part: Part) -> tuple[Floats, Flags]:
        """Return backward seconds of a part's runs, by choice, and whether each may fit."""
        found = []
        for member, window in enumerate(self.windows):
            # A member knows its own choices alone.
            own = tuple(
                replace(known, choice=known.choice - member * self._kinds)
                for known in rank.infeasible
                if known.choice // self._kinds == member
            )
            found.append(window.on_rank(replace(rank, infeasible=own), part))
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
    shares_tail: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.members[0].num_blocks

    def cost_window(self, window: Window) -> MixedCostWindow:
        """Return the costs of every run of a window."""
        windows = tuple(stages.cost_window(window) for stages in self.members)
        return MixedCostWindow(windows=windows, shares_tail=self.shares_tail)

    def costs_of(self, start: Indices, end: Indices) -> MixedCostWindow:
        """Return the costs of these runs."""
        windows = tuple(stages.costs_of(start, end) for stages in self.members)
        return MixedCostWindow(windows=windows, shares_tail=self.shares_tail)


def mixed_problem(problems: Sequence[ChainProblem]) -> ChainProblem:
    """Return the problem of mixing members' problems where each run has the shortest tail of all.

    Its value is no more than those of `by_first_mesh`. The members are of one schedule, so many
    microbatches and stages, and the same kinds of recompute.
    """
    return replace(
        problems[0],
        stages=MixedStages(members=tuple(problem.stages for problem in problems), shares_tail=True),
        block_forward_s=np.min([problem.block_forward_s for problem in problems], axis=0),
        block_backward_s=np.min([problem.block_backward_s for problem in problems], axis=0),
        block_weight_s=np.max([problem.block_weight_s for problem in problems], axis=0),
        hop_s=np.min([problem.hop_s for problem in problems], axis=0),
        back_hop_s=np.min([problem.back_hop_s for problem in problems], axis=0),
        start_s=min(problem.start_s for problem in problems),
        choices=problems[0].choices * len(problems),
        num_meshes=len(problems),
        needs=None,
        # Members' copies are left out: a bound all the same.
        copied=(),
    )


def by_first_mesh(problem: ChainProblem) -> list[ChainProblem]:
    """Return a mixed problem with the tails as they are, once for each mesh of stage 0."""
    assert isinstance(problem.stages, MixedStages)
    stages = replace(problem.stages, shares_tail=False)
    kinds = len(problem.choices) // len(stages.members)
    return [
        replace(
            problem,
            stages=stages,
            first_choices=tuple(range(kinds * first, kinds * (first + 1))),
        )
        for first in range(len(stages.members))
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix:
    """Meshes that the stages of a plan may choose from, under one schedule and ZeRO stage.

    A stage's choice is a mesh and a recompute choice, counted as in `MixedCostWindow`.
    """

    members: tuple[Member, ...]

    @property
    def configuration(self) -> Configuration:
        """The first member's, for what all members share: pp, vpp, schedule, microbatches."""
        return self.members[0].configuration

    @property
    def num_recompute_choices(self) -> int:
        """How many recompute choices a stage of each mesh has."""
        return len(recompute_choices(self.configuration.recompute))

    @property
    def label(self) -> str:
        """What is mixed."""
        return f"stages' own meshes: pp={self.configuration.pp} {self.configuration.schedule}"

    def indices(self, cut: Cut) -> list[int]:
        """Return the member (index) that each stage of a cut has chosen."""
        return [choice // self.num_recompute_choices for choice in cut.choices]

    def tables(self, cut: Cut) -> list[StageTable]:
        """Return the table of each stage's mesh."""
        return [self.members[index].table for index in self.indices(cut)]

    def least_step_s(self) -> float:
        """Return a step time that no mix beats: each block by its fastest member, dealt evenly."""
        tables = [member.table for member in self.members]
        block = np.min([table.forward_s + table.backward_s for table in tables], axis=0)
        m, pp = self.configuration.num_microbatches, self.configuration.pp
        return float(m * max(block.sum() / pp, block.max()))

    def least_back_hop_s(self, member: Member) -> Floats:
        """Return the least seconds of a gradient's way back from a member's stage starting at each
        block (n + 1), whichever mesh the stage before has.
        """
        degrees, pp = member.configuration.degrees, member.configuration.pp
        ways = [member.table.back_hop_s(degrees, pp=pp, to_tp=other.tp) for other in self.members]
        return np.min(ways, axis=0)

    def problems(self, candidates: Candidates, limit_bytes: float) -> tuple[ChainProblem, ...]:
        """Return the problems of chains of each member alone, but for whom they send back to."""
        return tuple(
            replace(
                candidates.problem(member.as_held, member.table, limit_bytes, is_mixed=True),
                back_hop_s=self.least_back_hop_s(member),
            )
            for member in self.members
        )

    def plan(self, candidates: Candidates, cut: Cut) -> tuple[Configuration, Plan]:
        """Return a solution as a configuration and a plan; its degrees are those of most blocks."""
        of_stage = self.indices(cut)
        # A plan has one mesh, and stages with another say so (`own_sizes`).
        base = self.members[int(np.bincount(of_stage, weights=np.diff(cut.cuts)).argmax())]
        recomputed = tuple(choice % self.num_recompute_choices for choice in cut.choices)
        plan = candidates.plan(base.configuration, base.table, replace(cut, choices=recomputed))
        used = {
            (self.members[index].tp, candidates.graph.blocks[block].class_index)
            for index, stage in zip(of_stage, plan.stages, strict=True)
            for block in stage.blocks
        }
        own = {member.tp: () if member is base else (("tp", member.tp),) for member in self.members}
        layouts = tuple(
            layout.model_copy(update={"own_sizes": own[member.tp]})
            for member in self.members
            for layout in member.table.layouts
            if (member.tp, layout.class_index) in used
        )
        tps = tuple(self.members[index].tp for index in of_stage)
        stages = tuple(
            stage.model_copy(update={"own_sizes": own[tp]})
            for stage, tp in zip(plan.stages, tps, strict=True)
        )
        return (
            replace(base.configuration, stage_tps=tps if len(set(tps)) > 1 else ()),
            plan.model_copy(update={"stages": stages, "layouts": layouts}),
        )

    def evaluate(self, candidates: Candidates, cut: Cut) -> EvaluatedPlan | None:
        """Return a solution's estimate; None where its stages cannot send each other samples."""
        configuration, plan = self.plan(candidates, cut)
        try:
            answer = candidates.estimate(plan)
        except LayoutError:
            return None
        return EvaluatedPlan(configuration=configuration, plan=plan, estimate=answer)
