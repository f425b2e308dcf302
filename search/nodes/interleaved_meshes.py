"""Node of a mix of meshes with interleaved stages: all choices of its ranks, best first.

All stages of a pp rank share its mesh, so a choice is made for each rank, and listed in the order
of its bound (`meshes/interleaved_mixes`). The node counts as one configuration until a plan of it
was evaluated; what it lists afterwards closes the gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from search.branch_and_bound import EvaluatedPlan, Node
from search.meshes.interleaved_mixes import Assignments, EvenMix
from search.nodes.partitions import APART, infeasible_stages
from search.partition.chain_problem import Cut
from search.search_state import Outcomes, SearchState

JOBS_PER_ESTIMATE = 2000
"""What an estimate costs beside its simulation, in simulated jobs."""

EVEN_BEATEN = "own meshes: the even cut cannot beat the best"
EVEN_TOO_LARGE = "own meshes, memory: the even cut does not fit"


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
