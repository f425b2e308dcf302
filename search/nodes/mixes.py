"""Nodes of mixes of meshes: stages that choose among several, each with a dp and tp of its own.

    MixesNode                 one choice of meshes, under all schedules and ZeRO stages
      MixNode                 the same under one of each                            partition phase
        PartitionedNode       its best stage boundaries and meshes of stages        estimate phase
      InterleavedMixNode      the same with several stages a rank: all choices of its ranks

All stages of a pp rank share its mesh, so with several stages a rank a choice is made for each
rank, and listed in the order of its bound (`meshes/interleaved_mixes`). Such a node counts as one
configuration until a plan of it was evaluated; what it lists afterwards closes the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from search.branch_and_bound import EvaluatedPlan, Node, Wave
from search.meshes.interleaved_mixes import Assignments, EvenMix, even_mixes
from search.meshes.mix import Mix
from search.meshes.mixed_stages import by_first_mesh, mixed_problem
from search.nodes.partitions import APART, PartitionableNode, infeasible_stages
from search.partition.chain_problem import ChainProblem, Cut
from search.partition.solvers import INEXACT, solve
from search.search_state import MIXED_PARTITIONS, Outcomes, SearchState
from search.stages.stage_table import StageTable

JOBS_PER_ESTIMATE = 2000
"""What an estimate costs beside its simulation, in simulated jobs."""

MIXED_BEATEN = "own meshes: the best cut cannot beat the best"
MIXED_TOO_LARGE = "own meshes, memory: no stage boundaries fit"
EVEN_BEATEN = "own meshes: the even cut cannot beat the best"
EVEN_TOO_LARGE = "own meshes, memory: the even cut does not fit"


@dataclass(frozen=True, kw_only=True, eq=False)
class MixesNode(Node[SearchState]):
    """A choice of meshes (and of the order of groups of devices) that stages may have.

    Its bound is that of its blocks alone, quick to find; the chain problems of its schedules are
    made where that may win.
    """

    mix: Mix
    options: tuple[tuple[str, int], ...]
    """Schedules, with stages of each rank."""
    zeros: tuple[int, ...]
    """ZeRO stages."""

    @property
    def num_configurations(self) -> int:
        """One for each schedule and ZeRO stage."""
        return len(self.options) * len(self.zeros)

    @property
    def label(self) -> str:
        """What is opened."""
        return self.mix.label

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the mix under each schedule and ZeRO stage."""
        limit_bytes = search.memory_limit_bytes
        for (schedule, vpp), zero in product(self.options, self.zeros):
            mix = self.mix.under(schedule, vpp, zero)
            if vpp == 1:
                yield MixNode(
                    bound=max(self.bound, mix.step_bound_s()),
                    wave=self.wave,
                    configuration=mix.configuration,
                    mix=mix,
                    alone=cache(lambda mix=mix: mix.problems(search.candidates, search.limits)),
                )
                continue
            even = tuple(even_mixes(search.candidates, mix, limit_bytes))
            search.num_considered += len(even) - 1
            for cut in even:
                bound = max(self.bound, cut.step_bound(cut.least_s))
                yield InterleavedMixNode(bound=bound, wave=self.wave, mix=cut)


def mixes_node(
    search: SearchState, mix: Mix, options: set[tuple[str, int]], zeros: set[int], wave: Wave
) -> MixesNode:
    """Return the node of a choice of meshes, which counts as considered."""
    node = MixesNode(
        bound=mix.least_step_s(),
        wave=wave,
        mix=mix,
        options=tuple(sorted(options)),
        zeros=tuple(sorted(zeros)),
    )
    search.num_considered += node.num_configurations
    return node


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
        relaxed, solver = self._relaxed(), search.request.solver
        solved = solve(relaxed, solver=solver, ceiling=search.to_beat_s)
        best: Cut | None = None
        if solved.cut is not None:
            ceiling = search.to_beat_s
            for exact in by_first_mesh(relaxed):
                cut = solve(exact, solver=solver, ceiling=ceiling).cut
                if cut is not None and (best is None or cut.value < best.value):
                    ceiling, best = min(ceiling, cut.value), cut
        if best is None:
            search.prune(MIXED_BEATEN if solved.fits else MIXED_TOO_LARGE)
            return
        yield self.partitioned(best, self.bound if solver == INEXACT else best.value)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class InterleavedMixNode(Node[SearchState]):
    """A mix of interleaved stages.

    Attributes:
        mix: the meshes, and the even cut of the stages.
        assignments: the choices that are left; None before they are listed.
        evaluated: choices that were evaluated, by stage.
    """

    mix: EvenMix
    assignments: Assignments | None = None
    evaluated: frozenset[tuple[int, ...]] = frozenset()

    @property
    def num_configurations(self) -> int:
        """A single configuration, until a plan of it was evaluated."""
        return int(not self.evaluated)

    @property
    def label(self) -> str:
        """What is mixed."""
        return self.mix.mix.label

    def refine(self, search: SearchState) -> Outcomes:
        """Take one step in the list of choices; evaluate a choice that is complete."""
        node, assignments = self, self.assignments
        if assignments is None:
            assignments = Assignments(self.mix, search.to_beat_s)
            if not assignments.fits:
                search.prune(EVEN_TOO_LARGE, self.num_configurations)
                return
        else:
            cut = assignments.advance()
            if cut is not None and not self._is_evaluated(cut):
                done = self._evaluate(search, cut)
                if done is not None and not search.fits(done):
                    yield self._without_infeasible(search.limits, cut, done)
                    return
                if not self.evaluated:
                    if done is None:
                        search.prune(APART)
                    else:
                        search.num_evaluated += 1
                if done is not None:
                    yield done
                node = replace(self, evaluated=self.evaluated | {cut.choices})
        if assignments.bound == float("inf"):
            search.prune(EVEN_BEATEN, node.num_configurations)
        else:
            bound = max(self.bound, assignments.bound)
            yield replace(node, assignments=assignments, bound=bound)

    def _is_evaluated(self, cut: Cut) -> bool:
        """Whether a choice was evaluated here, or as a configuration of one mesh."""
        return cut.choices in self.evaluated or self.mix.is_known(cut)

    def _evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        mix, configuration = self.mix.mix, self.mix.mix.configuration
        if self.evaluated:
            search.extra_work += (
                JOBS_PER_ESTIMATE
                + 2 * configuration.pp * configuration.vpp * configuration.num_microbatches
            )
            search.num_other_partitions += 1
        return mix.evaluate(search.candidates, cut)

    def _without_infeasible(
        self, limits: Mapping[str, float], cut: Cut, done: EvaluatedPlan
    ) -> InterleavedMixNode:
        """Return the mix, to be listed again without the choices of ranks that are too large."""
        mix = self.mix
        infeasible = infeasible_stages(done, cut, (), limits, mix.mix.tables(cut))
        return replace(self, mix=mix.without(tuple(infeasible)), assignments=None)
