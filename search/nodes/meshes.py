"""Nodes of plans whose stages have meshes of their own (``meshes="own"``).

What may be mixed are shapes of equal cp, pp and microbatches: they differ in how the devices of a
pp rank are divided into dp and tp.

    MeshesNode                all mixes of the request's shapes
      MixNode                 one choice of meshes, a schedule, a ZeRO stage    partition phase
        PartitionedNode       its best stage boundaries and meshes of stages    estimate phase
      InterleavedMixNode      the same with several stages a rank (`interleaved_meshes`)

Microbatch sizes that the search left out for one mesh are not mixed (`skipped_sizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from planner.layout import axes
from planner.layout.axes import Degrees, OwnSizes
from planner.schedule import find_schedule
from search.bounds.round_trips import pipeline_line
from search.branch_and_bound import BEATEN, EvaluatedPlan, Node, Wave
from search.candidates import block_seconds
from search.meshes.interleaved_mixes import even_mixes
from search.meshes.own_meshes import Member, Mix, by_first_mesh, mixed_problem
from search.nodes.configurations import SOLVERS
from search.nodes.interleaved_meshes import JOBS_PER_ESTIMATE, InterleavedMixNode
from search.nodes.partitions import PartitionableNode
from search.partition.chain_dp import Solved, solve_chain
from search.partition.chain_problem import ChainProblem, Cut
from search.search_state import MIXED_PARTITIONS, MIXES, Outcomes, SearchState
from search.space.configuration import Configuration, Shape
from search.stages.stage_table import StageTable

MIXED_BEATEN = "own meshes: the best cut cannot beat the best"
MIXED_TOO_LARGE = "own meshes, memory: no stage boundaries fit"


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshesNode(Node[SearchState]):
    """Every mix of two or more meshes' tables, with a schedule and a ZeRO stage."""

    shapes: Sequence[Shape]

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mixes."""
        for group in self.mixable(search):
            if len(group) == 1:
                continue
            options = sorted({option for shape in group for option in shape.options})
            zeros = sorted({zero for shape in group for zero in shape.zeros})
            if group[0].cp > 1 and self._least_with_cp(search, group) >= search.to_beat_s:
                search.num_considered += len(options) * len(zeros)
                search.prune(BEATEN, len(options) * len(zeros))
                continue
            for members in _members(search, group):
                yield from self._mixes(search, Mix(members=members), options, zeros)

    def mixable(self, search: SearchState) -> Iterator[list[Shape]]:
        """Yield shapes that stages of one plan may have, together."""
        groups: dict[tuple[OwnSizes, int, int], list[Shape]] = {}
        for shape in self.shapes:
            size = shape.cp, shape.tp, shape.microbatch_size
            if shape.pp > 1 and size not in search.skipped_sizes:
                key = _common_sizes(shape.degrees), shape.pp, shape.num_microbatches
                groups.setdefault(key, []).append(shape)
        yield from groups.values()

    def _least_with_cp(self, search: SearchState, group: Sequence[Shape]) -> float:
        """Return a step time that no mix beats: cp divides at best all that blocks do without."""
        without = tuple(
            Member(configuration=any_configuration(shape), table=table)
            for shape in group
            for table in search.candidates.tables(shape.tp, shape.microbatch_size)
        )
        return Mix(members=without).least_step_s() / group[0].cp

    def _mixes(
        self,
        search: SearchState,
        mix: Mix,
        options: list[tuple[str, int]],
        zeros: list[int],
    ) -> Outcomes:
        least, limit = mix.least_step_s(), search.memory_limit_bytes
        for (schedule, vpp), zero in product(options, zeros):
            some = mix.under(schedule, vpp, zero)
            if least >= search.to_beat_s:
                search.num_considered += 1
                search.prune(BEATEN)
            elif vpp > 1:
                for even in even_mixes(search.candidates, some, limit):
                    search.num_considered += 1
                    bound = even.step_bound(even.least_s)
                    yield InterleavedMixNode(bound=bound, wave=self.wave, mix=even)
            else:
                search.num_considered += 1
                yield mix_node(search, some, self.wave)


def _common_sizes(degrees: Degrees) -> OwnSizes:
    """Return the sizes on the axes where all stages of a plan have the same."""
    common = [axis.name for axis in axes.AXES if not (axis.own_by_stage or axis.takes_rest)]
    return tuple((name, degrees[name]) for name in common)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixNode(PartitionableNode):
    """Meshes that stages may choose from, under one schedule and ZeRO stage.

    Attributes:
        mix: the meshes.
        alone: returns the chain problem of each mesh alone, made when first called.
    """

    mix: Mix
    alone: Callable[[], tuple[ChainProblem, ...]]

    @property
    def label(self) -> str:
        """What is mixed."""
        return self.mix.label

    @property
    def num_jobs(self) -> int:
        """What an evaluation costs: a whole estimate, in simulated jobs."""
        return JOBS_PER_ESTIMATE + super().num_jobs

    @property
    def wave_of_others(self) -> Wave:
        """When the partitions beside the best are listed."""
        return MIXED_PARTITIONS

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mix with its best stage boundaries and meshes, if any fit and may win."""
        relaxed = self._relaxed()
        solved = _solve(search, relaxed, search.to_beat_s)
        best: Cut | None = None
        if solved.cut is not None:
            ceiling = search.to_beat_s
            for exact in by_first_mesh(relaxed):
                cut = _solve(search, exact, ceiling).cut
                if cut is not None and (best is None or cut.value < best.value):
                    ceiling, best = min(ceiling, cut.value), cut
        if best is None:
            search.prune(MIXED_BEATEN if solved.fits else MIXED_TOO_LARGE)
            return
        is_proof = search.request.solver != "recursive"
        yield self.partitioned(best, best.value if is_proof else self.bound)

    def _relaxed(self) -> ChainProblem:
        """Return the chain problem in which a choice is a mesh with a recompute choice.

        Its value is no more than that of the exact problems, one for each mesh of stage 0.
        """
        alone = self.alone()
        mixed = mixed_problem(alone, self.mix.members_of_stage)
        mixed = replace(mixed, views=self.mix.stage_views(alone))
        return replace(mixed, infeasible=self.infeasible, is_conservative=self.is_conservative)

    def problems(self, search: SearchState) -> list[ChainProblem]:
        """Return the exact problems."""
        return by_first_mesh(self._relaxed())

    def simulate(self, search: SearchState, cut: Cut) -> float:
        """Return 0: only the estimate has transfers between meshes."""
        return 0.0

    def evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return the plan of a solution; None where stages cannot send each other samples."""
        return self.mix.evaluate(search.candidates, cut)

    def tables(self, cut: Cut) -> list[StageTable]:
        """Return the table of each stage's mesh."""
        return self.mix.tables(cut)


def mix_node(search: SearchState, mix: Mix, wave: Wave) -> MixNode:
    """Return the node of a mix under its schedule and ZeRO stage."""
    return MixNode(
        bound=_least_step_s(mix),
        wave=wave,
        configuration=mix.configuration,
        mix=mix,
        alone=cache(lambda: mix.problems(search.candidates, search.limits)),
    )


def meshes_node(shapes: Sequence[Shape]) -> MeshesNode:
    """Return the root of all mixes."""
    return MeshesNode(bound=0.0, wave=MIXES, shapes=shapes)


def _least_step_s(mix: Mix) -> float:
    """Return a step time that a mix does not beat, as `bounds` has it of one mesh.

    Each block counts at its quickest member, and what a gradient leaves behind at its longest.
    """
    configuration = mix.configuration
    forward_s, backward_s, weight_s = zip(
        *(block_seconds(member.as_held, member.table) for member in mix.members), strict=True
    )
    of_members = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    block = np.min(of_members, axis=0)
    ahead = np.max(weight_s, axis=0)
    m, pp = configuration.num_microbatches, configuration.pp
    bound = m * max(block.sum() / mix.fastest_ranks(of_members), block.max())
    if not find_schedule(configuration.schedule).splits_backward:
        part = float((ahead / np.where(ahead > 0, block, 1.0)).max())
        part = min(round(part, 6) + 1e-6, 1.0) if part else 0.0
        if part < 1.0:
            factor, firsts = pipeline_line(configuration.schedule, pp, m, part)
            bound = max(bound, block.sum() * factor - firsts * ahead[1:].max(initial=0.0))
    return float(bound)


def _members(search: SearchState, group: Sequence[Shape]) -> Iterator[tuple[Member, ...]]:
    """Yield every choice of a table for each shape that has any."""
    by_shape = [
        [
            Member(configuration=any_configuration(shape), table=table)
            for table in search.candidates.tables(shape.tp, shape.microbatch_size, shape.cp)
        ]
        for shape in group
    ]
    some = [members for members in by_shape if members]
    if len(some) > 1:
        yield from product(*some)


def any_configuration(shape: Shape) -> Configuration:
    """Return a shape's first configuration."""
    return next(shape.configurations())


def _solve(search: SearchState, problem: ChainProblem, ceiling: float) -> Solved:
    if search.request.solver == "dp":
        return solve_chain(problem, ceiling=ceiling)
    cut = SOLVERS[search.request.solver](problem)
    return Solved(cut=cut, fits=cut is not None)
