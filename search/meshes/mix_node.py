"""The node of a mix: all stage boundaries, with a mesh for each stage (partition phase)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodel.estimate import step_seconds
from planner.errors import LayoutError
from search.branch_and_bound import EvaluatedPlan, Wave
from search.meshes.mix import Mix
from search.meshes.mixed_stages import by_first_mesh, mixed_problem
from search.nodes.partitions import JOBS_PER_ESTIMATE, PartitionableNode
from search.partition.chain_problem import ChainProblem, Cut
from search.partition.solvers import solve
from search.request import INEXACT_SOLVER
from search.search_state import MIXED_PARTITIONS, Outcomes, SearchState
from search.stages.stage_table import StageTable

MIXED_BEATEN = "own meshes: the best cut cannot beat the best"
MIXED_TOO_LARGE = "own meshes, memory: no stage boundaries fit"


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
        """What the time of a solution costs, in simulated jobs: about half of an estimate."""
        return JOBS_PER_ESTIMATE // 2 + super().num_jobs

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
            # One problem for each mesh of stage 0, under the best value so far; the relaxed one, in
            # which stage 0's tail is the shortest of any mesh, rules most mixes out.
            for exact in by_first_mesh(relaxed):
                cut = solve(exact, solver=solver, ceiling=ceiling).cut
                if cut is not None and (best is None or cut.value < best.value):
                    ceiling, best = min(ceiling, cut.value), cut
        if best is None:
            search.prune(MIXED_BEATEN if solved.fits else MIXED_TOO_LARGE)
            return
        yield self.partitioned(best, self.bound if solver == INEXACT_SOLVER else best.value)

    def _relaxed(self) -> ChainProblem:
        """Return the chain problem in which a choice is a mesh with a recompute choice.

        Its value is no more than that of the exact problems, one for each mesh of stage 0.
        """
        alone = self.alone()
        mixed = mixed_problem(alone, self.mix.members_of_stage)
        mixed = replace(mixed, views=self.mix.stage_views(alone))
        return replace(mixed, infeasible=self.infeasible)

    def problems(self, search: SearchState) -> list[ChainProblem]:
        """Return the exact problems."""
        return by_first_mesh(self._relaxed())

    def simulate(self, search: SearchState, cut: Cut) -> float:
        """Return 0: only the estimate has transfers between meshes."""
        return 0.0

    def evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return the plan of a solution; None where stages cannot send each other samples."""
        return self.mix.evaluate(search.candidates, cut)

    def evaluate_faster(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return the plan of a solution; None if it is no faster than the best, whose memory is
        not walked then.
        """
        _, plan = self.mix.plan(search.candidates, cut)
        try:
            step_s = step_seconds(plan, search.candidates.costs)
        except LayoutError:
            return None
        # The walk of memory is the dearer half of an estimate: only what is faster is worth it.
        if step_s >= search.to_beat_s * (1 - 1e-9):
            return None
        search.extra_work += JOBS_PER_ESTIMATE
        return self.evaluate(search, cut)

    def tables(self, cut: Cut) -> list[StageTable]:
        """Return the table of each stage's mesh."""
        return self.mix.tables(cut)
