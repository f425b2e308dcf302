"""Stages with meshes of their own: each pp rank cuts its ranks into the dp and tp that suit it.

All pp ranks have equally many ranks, G = dp tp beside cp, and one microbatch is the same B samples
for all of them, so a stage is free to take any tp that divides G and leaves its G / tp replicas
whole samples of B. In a cluster of several groups of devices a stage lies on one of them, and its
mesh is of that group's devices: an order of the groups says which stages these are. What a stage
then costs is what it costs in a plan where all stages have that tp (the
estimate prices what arrives by the mesh of who receives it). A chain that may mix G's meshes is
therefore the chain problem (`chain_problem`) with a choice (mesh, recompute) in place of
recompute alone. `before` and `after` there are taken over the fastest mesh of each block, and a
transfer over the cheapest, so the value stays a lower bound; the tail of stage 0 enters the paths
of all others, so each of its meshes is a problem of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from costmodel.topology import pipeline_group, way_out
from planner.errors import LayoutError
from planner.graph import ModelGraph
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
    StageView,
)
from search.partition.chain_windows import Part, Window
from search.space.configuration import Configuration, recompute_choices
from search.stages.stage_table import StageTable


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One mesh that stages may have: the configuration and table of all stages having it; of
    several groups of devices, that on which it lies.
    """

    configuration: Configuration
    table: StageTable
    device_group: str = ""

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
    return replace(
        problems[0],
        stages=MixedStages(
            members=tuple(problem.stages for problem in problems),
            limits=tuple(problem.memory_limit_bytes for problem in problems),
            shares_tail=True,
        ),
        stage_choices=tuple(
            tuple(kinds * member + own for member in members for own in range(kinds))
            for members in members_of_stage
        ),
        block_forward_s=np.min([problem.block_forward_s for problem in problems], axis=0),
        block_backward_s=np.min([problem.block_backward_s for problem in problems], axis=0),
        block_weight_s=np.max([problem.block_weight_s for problem in problems], axis=0),
        transfer_s=np.min([problem.transfer_s for problem in problems], axis=0),
        back_transfer_s=np.min([problem.back_transfer_s for problem in problems], axis=0),
        start_s=min(problem.start_s for problem in problems),
        choices=problems[0].choices * len(problems),
        num_meshes=len(problems),
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
                earlier_transfers_s=totals(least[1:s]),
                later_transfers_s=totals(least[s + 2 :]),
            )
        )
    return tuple(views)


def by_first_mesh(problem: ChainProblem) -> list[ChainProblem]:
    """Return a mixed problem with the tails as they are, once for each mesh of stage 0."""
    assert isinstance(problem.stages, MixedStages)
    stages = replace(problem.stages, shares_tail=False)
    kinds = len(problem.choices) // len(stages.members)
    every = tuple(range(len(problem.choices)))
    first, *others = problem.stage_choices or (every,) * problem.num_stages
    of_member = [first[at : at + kinds] for at in range(0, len(first), kinds)]
    return [replace(problem, stages=stages, stage_choices=(own, *others)) for own in of_member]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix:
    """Meshes that the stages of a plan may choose from, under one schedule and ZeRO stage.

    A stage's choice is a mesh and a recompute choice, counted as in `MixedCostWindow`.
    """

    members: tuple[Member, ...]
    device_groups: tuple[str, ...] = ()
    """The group of devices that each stage lies on; empty in a cluster of equal devices."""

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
        kind = "devices of several groups" if self.device_groups else "stages' own meshes"
        return f"{kind}: pp={self.configuration.pp} {self.configuration.schedule}"

    @cached_property
    def members_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The members (indices) that each stage may be of; empty where all may be of all."""
        return tuple(
            tuple(at for at, member in enumerate(self.members) if member.device_group == group)
            for group in self.device_groups
        )

    def under(self, schedule: str, vpp: int, zero: int) -> Mix:
        """Return the same meshes under a schedule, stages a rank, and a ZeRO stage."""
        members = [
            replace(
                member,
                configuration=replace(member.configuration, schedule=schedule, vpp=vpp, zero=zero),
            )
            for member in self.members
        ]
        return replace(self, members=tuple(members))

    def indices(self, cut: Cut) -> list[int]:
        """Return the member (index) that each stage of a cut has chosen."""
        return [choice // self.num_recompute_choices for choice in cut.choices]

    def tables(self, cut: Cut) -> list[StageTable]:
        """Return the table of each stage's mesh."""
        return [self.members[index].table for index in self.indices(cut)]

    def least_step_s(self) -> float:
        """Return a step time that no mix beats: each block by its fastest member, dealt evenly."""
        of_members = [member.table.forward_s + member.table.backward_s for member in self.members]
        block = np.min(of_members, axis=0)
        ranks = self.fastest_ranks(of_members)
        return float(self.configuration.num_microbatches * max(block.sum() / ranks, block.max()))

    def fastest_ranks(self, seconds_of_members: Sequence[Floats]) -> float:
        """Return how many ranks that take the least of all members on every block (n) do at least
        as much as this mix's.

        A rank whose members take k times the least on any block at best counts as 1 / k.
        """
        if not self.device_groups:
            return float(self.configuration.pp)
        least = np.min(seconds_of_members, axis=0)
        has_work = least > 0
        ranks = 0.0
        for members in self.members_of_stage:
            own = np.min([seconds_of_members[at] for at in members], axis=0)
            times = (own[has_work] / least[has_work]).min(initial=np.inf)
            ranks += 1.0 / times if np.isfinite(times) else 1.0
        return ranks

    def least_transfers_s(self, member: Member) -> tuple[Floats, Floats]:
        """Return the least seconds of a transfer into a member's stage starting at each block
        (n + 1), and of its gradient's way back, whichever mesh and devices the stage before has.
        """
        if not self.device_groups:
            return self._transfers_s(member, is_inside=True)
        own = self.device_groups.count(member.device_group)
        found = [self._transfers_s(member, is_inside=is_inside) for is_inside in {False, own > 1}]
        there, back = zip(*found, strict=True)
        return np.min(there, axis=0), np.min(back, axis=0)

    def _transfers_s(self, member: Member, *, is_inside: bool) -> tuple[Floats, Floats]:
        """Return the same from a stage on the same group of devices (`is_inside`), or another."""
        messages, configuration = member.table.chain.messages, member.configuration
        cluster, pp = member.table.profile.cluster, configuration.pp
        if self.device_groups:
            pp = self.device_groups.count(member.device_group)
        pp_group = pipeline_group(cluster, configuration.degrees, pp=pp)
        if not is_inside:
            pp_group = way_out(cluster)
        ways = [
            messages.transfer_s(pp_group, to_tp=tp)[1]
            for tp in {other.tp for other in self.members}
        ]
        return messages.transfer_s(pp_group)[0], np.min(ways, axis=0)

    def stage_views(self, problems: Sequence[ChainProblem]) -> tuple[StageView, ...]:
        """Return what each stage is near to; nothing where all devices are equal."""
        if not self.device_groups:
            return ()
        before = (self.device_groups[0], *self.device_groups[:-1])
        transfers_s = [
            [self._transfers_s(self.members[at], is_inside=group == last) for at in members]
            for group, last, members in zip(
                self.device_groups, before, self.members_of_stage, strict=True
            )
        ]
        return stage_views(problems, self.members_of_stage, transfers_s)

    def problems(
        self, candidates: Candidates, limits: Mapping[str, float]
    ) -> tuple[ChainProblem, ...]:
        """Return the problems of chains of each member alone, but for whom they send back to;
        `limits` are the bytes of a device of each group.
        """
        found = []
        for member in self.members:
            limit_bytes = limits[member.device_group]
            alone = candidates.problem(member.as_held, member.table, limit_bytes, is_mixed=True)
            transfer_s, back_transfer_s = self.least_transfers_s(member)
            found.append(replace(alone, transfer_s=transfer_s, back_transfer_s=back_transfer_s))
        return tuple(found)

    def plan(self, candidates: Candidates, cut: Cut) -> tuple[Configuration, Plan]:
        """Return a solution as a configuration and a plan; its degrees are those of most blocks."""
        of_stage = self.indices(cut)
        # A plan has one mesh, and stages with another say so (`own_sizes`).
        base = self.members[int(np.bincount(of_stage, weights=np.diff(cut.cuts)).argmax())]
        recomputed = tuple(choice % self.num_recompute_choices for choice in cut.choices)
        plan = candidates.plan(base.configuration, base.table, replace(cut, choices=recomputed))
        used = self._used_layouts(candidates.graph, plan, of_stage)
        # Members of one tp on several groups of devices have the same layouts.
        by_tp = {member.tp: member for member in self.members}
        own = {tp: () if tp == base.tp else (("tp", tp),) for tp in by_tp}
        layouts = tuple(
            layout.model_copy(update={"own_sizes": own[tp]})
            for tp, member in by_tp.items()
            for layout in member.table.layouts
            if (tp, layout.class_index) in used
        )
        tps = tuple(self.members[index].tp for index in of_stage)
        groups = self.device_groups or ("",) * len(tps)
        stages = tuple(
            stage.model_copy(update={"own_sizes": own[tp], "device_group": group})
            for stage, tp, group in zip(plan.stages, tps, groups, strict=True)
        )
        return (
            replace(
                base.configuration,
                stage_tps=tps if len(set(tps)) > 1 else (),
                device_groups=self.device_groups,
            ),
            plan.model_copy(update={"stages": stages, "layouts": layouts}),
        )

    def _used_layouts(
        self, graph: ModelGraph, plan: Plan, of_stage: Sequence[int]
    ) -> set[tuple[int, int]]:
        """Return (tp, class) of the layouts that the stages' prices stand on: of the blocks of a
        stage, and of those that make its inputs, which are priced as if they came from its mesh.
        """
        used = set()
        for index, stage in zip(of_stage, plan.stages, strict=True):
            inputs = {name for block in stage.blocks for name in graph.blocks[block].inputs}
            makers = {graph.producer[name] for name in inputs if name in graph.producer}
            for block in makers.union(stage.blocks):
                used.add((self.members[index].tp, graph.blocks[block].class_index))
        return used

    def evaluate(self, candidates: Candidates, cut: Cut) -> EvaluatedPlan | None:
        """Return a solution's estimate; None where its stages cannot send each other samples."""
        configuration, plan = self.plan(candidates, cut)
        try:
            answer = candidates.estimate(plan)
        except LayoutError:
            return None
        return EvaluatedPlan(configuration=configuration, plan=plan, estimate=answer)
