"""Stages with meshes of their own: each pp rank cuts its ranks into the dp and tp that suit it.

All pp ranks have equally many ranks, G = dp tp beside cp, and one microbatch is the same B samples
for all of them, so a stage is free to take any tp that divides G and leaves its G / tp replicas
whole samples of B. What it then costs is what it costs in a plan where all stages have that tp (the
estimate prices what arrives by the mesh of who receives it). A chain that may mix G's meshes is
therefore the chain problem (`chain_problem`) with a choice (mesh, recompute) in place of
recompute alone. `before` and `after` there are taken over the fastest mesh of each block, and a
hop over the cheapest, so the value stays a lower bound; the tail of stage 0 enters the paths
of all others, so each of its meshes is a problem of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.errors import LayoutError
from planner.plan import ClassLayout, Plan
from search.branch_and_bound import EvaluatedPlan
from search.candidates import Candidates
from search.partition.chain_problem import Band, ChainProblem, Cut, Flags, Floats, Stages
from search.partition.chain_windows import Part, Window
from search.space.shapes import Configuration
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


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedBand:
    """A band (see `chain_problem.Band`) whose choices are those of one member after the other.

    With `shares_tail` a run's tail is the shortest of all members'.
    """

    bands: tuple[Band, ...]
    shares_tail: bool

    @cached_property
    def forward_s(self) -> Floats:
        """Forward seconds, by choice."""
        return np.concatenate([band.forward_s for band in self.bands])

    @cached_property
    def backward_s(self) -> Floats:
        """Backward seconds, by choice."""
        return np.concatenate([band.backward_s for band in self.bands])

    @cached_property
    def tail_s(self) -> Floats:
        """Seconds after the last job, by choice unless it is shared."""
        if self.shares_tail:
            return np.min([band.tail_s for band in self.bands], axis=0)
        return np.concatenate(
            [np.broadcast_to(band.tail_s, band.forward_s.shape) for band in self.bands]
        )

    @cached_property
    def copies_s(self) -> tuple[Floats, Floats]:
        """Seconds of copies to the host and back."""
        down, up = zip(*(band.copies_s for band in self.bands), strict=True)
        return np.concatenate(down), np.concatenate(up)

    def peak_bytes(self, in_flight: int, choice: int) -> Floats:
        """About the bytes of a rank holding each run."""
        member, own = divmod(choice, self._kinds)
        return self.bands[member].peak_bytes(in_flight, own)

    def fits(self, in_flight: int, choice: int, limit_bytes: float, part: Part = ...) -> Flags:
        """Whether each run of a part may be within a limit."""
        member, own = divmod(choice, self._kinds)
        return self.bands[member].fits(in_flight, own, limit_bytes, part)

    @property
    def _kinds(self) -> int:
        return len(self.bands[0].forward_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedStages:
    """`chain_problem.Stages` whose stages may each be any member's."""

    members: tuple[Stages, ...]
    shares_tail: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the chain."""
        return self.members[0].num_blocks

    def band(self, window: Window) -> MixedBand:
        """Return the costs of every run of a window."""
        bands = tuple(stages.band(window) for stages in self.members)
        return MixedBand(bands=bands, shares_tail=self.shares_tail)


def mixed_problem(problems: Sequence[ChainProblem]) -> ChainProblem:
    """Return the problem of mixing members' problems where each run has the shortest tail of all.

    Its value is no more than those of `by_first_mesh`. The members are of one schedule, so many
    microbatches and stages, and the same kinds of recompute.
    """
    most = [problem.most_blocks for problem in problems]
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
        most_blocks=None if None in most else max(blocks or 0 for blocks in most),
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


def least_of_blocks(members: Sequence[Member]) -> float:
    """Return a step time that no mix can beat: each block by its quickest member, dealt evenly."""
    block = np.min([member.table.forward_s + member.table.backward_s for member in members], axis=0)
    configuration = members[0].configuration
    return float(configuration.num_microbatches * max(block.sum() / configuration.pp, block.max()))


def as_held(configuration: Configuration) -> Configuration:
    """Return a member's configuration as its stages have it: ZeRO shards nothing where there are no
    replicas.
    """
    return (
        replace(configuration, zero=0)
        if configuration.degrees.along("data") == 1
        else configuration
    )


def least_back_hop_s(member: Member, members: Sequence[Member]) -> Floats:
    """Return the least seconds of a gradient's way back from a member's stage starting at each
    block (n + 1), whichever mesh the stage before has.
    """
    configuration = member.configuration
    return np.min(
        [
            member.table.back_hop_s(configuration.degrees, pp=configuration.pp, to_tp=other.tp)
            for other in members
        ],
        axis=0,
    )


def member_problems(
    candidates: Candidates, members: Sequence[Member], limit_bytes: float
) -> tuple[ChainProblem, ...]:
    """Return the problems of chains of each member alone, but for whom they send back to."""
    return tuple(
        replace(
            candidates.problem(as_held(member.configuration), member.table, limit_bytes),
            back_hop_s=least_back_hop_s(member, members),
        )
        for member in members
    )


def plan_of_mix(
    candidates: Candidates, members: Sequence[Member], cut: Cut, kinds: int
) -> tuple[Configuration, Plan]:
    """Return a solution as a configuration and a plan; its degrees are those of most blocks."""
    of_stage = [choice // kinds for choice in cut.choices]
    sizes = np.bincount(of_stage, weights=np.diff(cut.cuts))
    base = members[int(sizes.argmax())]
    alone = replace(cut, choices=tuple(choice % kinds for choice in cut.choices))
    plan = candidates.plan(base.configuration, base.table, alone)
    used = {
        (members[of_stage[stage]].tp, candidates.graph.blocks[block].class_index)
        for stage, held in enumerate(plan.stages)
        for block in held.blocks
    }
    layouts: list[ClassLayout] = []
    for member in members:
        own = () if member is base else (("tp", member.tp),)
        layouts += [
            layout.model_copy(update={"own_sizes": own})
            for layout in member.table.layouts
            if (member.tp, layout.class_index) in used
        ]
    stages = tuple(
        held.model_copy(
            update={"own_sizes": () if members[at] is base else (("tp", members[at].tp),)}
        )
        for held, at in zip(plan.stages, of_stage, strict=True)
    )
    tps = tuple(members[at].tp for at in of_stage)
    return (
        replace(base.configuration, stage_tps=tps if len(set(tps)) > 1 else ()),
        plan.model_copy(update={"stages": stages, "layouts": tuple(layouts)}),
    )


def price_mix(
    candidates: Candidates, members: Sequence[Member], cut: Cut, kinds: int
) -> EvaluatedPlan | None:
    """Return a solution's estimate; None where its stages cannot send each other samples."""
    configuration, plan = plan_of_mix(candidates, members, cut, kinds)
    try:
        return EvaluatedPlan(
            configuration=configuration, plan=plan, estimate=candidates.estimate(plan)
        )
    except LayoutError:
        return None
