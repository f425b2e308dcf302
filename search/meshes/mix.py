"""Stages with meshes of their own: each pp rank cuts its ranks into the dp and tp that suit it.

All pp ranks have equally many ranks, G = dp tp beside cp, and one microbatch is the same B samples
for all of them, so a stage is free to take any tp that divides G and leaves its G / tp replicas
whole samples of B. In a cluster of several groups of devices a stage lies on one of them, and its
mesh is of that group's devices: an order of the groups says which stages these are. What a stage
then costs is what it costs in a plan where all stages have that tp (the estimate prices what
arrives by the mesh of who receives it). A chain that may mix G's meshes is therefore the chain
problem with a choice (mesh, recompute) in place of recompute alone (`mixed_stages`).
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
from search.bounds.round_trips import pipeline_line
from search.branch_and_bound import EvaluatedPlan
from search.candidates import Candidates
from search.meshes.mixed_stages import stage_views
from search.partition.chain_problem import ChainProblem, Cut, Floats, StageView
from search.priced_configuration import PricedConfiguration
from search.space.configuration import Configuration, recompute_choices
from search.stages.rank_stages import RankStages
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
        # Some rank does its share at least, and a block lies on one rank.
        return float(self.configuration.num_microbatches * max(block.sum() / ranks, block.max()))

    def step_bound_s(self) -> float:
        """Return a step time that the mix does not beat under its schedule, as `bounds` has it of a
        single mesh: each block counts at its quickest member, and what a gradient leaves behind at
        its longest.
        """
        configuration = self.configuration
        ranks = [RankStages(table=own.table, configuration=own.as_held) for own in self.members]
        forward_s, backward_s, weight_s = zip(*(own.least_block_s for own in ranks), strict=True)
        of_members = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        block = np.min(of_members, axis=0)
        # What a gradient leaves behind shortens waits: its most is the bound.
        ahead = np.max(weight_s, axis=0)
        m, pp = configuration.num_microbatches, configuration.pp
        bound = m * max(block.sum() / self.fastest_ranks(of_members), block.max())
        order = configuration.stated_order
        if not order.splits_backward:
            part = float((ahead / np.where(ahead > 0, block, 1.0)).max())
            # Rounded up, so that few different lines are computed.
            part = min(round(part, 6) + 1e-6, 1.0) if part else 0.0
            # With a part of 1 nothing of a block would be on a gradient's way: c is 0 / 0.
            if part < 1.0:
                factor, firsts = pipeline_line(order, pp, m, part)
                bound = max(bound, block.sum() * factor - firsts * ahead[1:].max(initial=0.0))
        return float(bound)

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
            # A rank on slower devices does at most 1 / times of what a fastest one does.
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
        cluster, pp = member.table.costs.cluster, configuration.pp
        if self.device_groups:
            pp = self.device_groups.count(member.device_group)
        pp_group = pipeline_group(cluster, configuration.degrees, pp=pp)
        if not is_inside:
            # A neighbour on another group of devices is reached over the outermost tier of links.
            pp_group = way_out(cluster)
        # A gradient goes back to a stage of any member's
        # tp, which gathers its pieces: the cheapest.
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
            alone = PricedConfiguration(candidates, member.as_held, member.table).problem(
                limit_bytes, is_mixed=True
            )
            # Alone, a member's stages send to their like; here the neighbour may be any member's.
            transfer_s, back_transfer_s = self.least_transfers_s(member)
            found.append(replace(alone, transfer_s=transfer_s, back_transfer_s=back_transfer_s))
        return tuple(found)

    def plan(self, candidates: Candidates, cut: Cut) -> tuple[Configuration, Plan]:
        """Return a solution as a configuration and a plan; its degrees are those of most blocks."""
        of_stage = self.indices(cut)
        # A plan has one mesh, and stages with another say so (`own_sizes`).
        base = self.members[int(np.bincount(of_stage, weights=np.diff(cut.cuts)).argmax())]
        recomputed = tuple(choice % self.num_recompute_choices for choice in cut.choices)
        priced = PricedConfiguration(candidates, base.configuration, base.table)
        plan = priced.plan(replace(cut, choices=recomputed))
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
