"""Nodes of the k best partitions of an evaluated configuration: they close the search's gap.

    PartitionsNode          all stage boundaries of one configuration or mix of meshes
      FirstStageNode        those whose stage 0 ends at a given block
        FirstStagesNode     those whose first stages are given; all given: a plan to evaluate

A configuration was counted when its best partition was evaluated, so these nodes count for none,
and stop after `MOST_EXTRA_WORK`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from search.branch_and_bound import EvaluatedPlan, Node
from search.partition.chain_problem import ChainProblem, Cut, TooLarge
from search.partition.k_best import FirstStages, KBestPartitions
from search.search_state import Outcomes, SearchState

_LEAST_WORK = 200
"""What the shortest simulation costs, in simulated jobs."""
_RUNS_PER_JOB = 200
"""Runs of blocks that the dynamic program visits in the time of one simulated job."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionSource:
    """Whose partitions are listed, and how they are evaluated.

    Attributes:
        num_jobs: jobs of one simulation.
        problems: chain problems that cover all partitions, each partition in one of them.
        evaluate: returns the plan of a partition, None if it cannot be faster than the best.
        infeasible_stages: returns the stages of an evaluated partition that do not fit.
        infeasible: stages known not to fit; grows while partitions are evaluated.
    """

    num_jobs: int
    problems: Callable[[], Sequence[ChainProblem]]
    evaluate: Callable[[Cut], EvaluatedPlan | None]
    infeasible_stages: Callable[[Cut, EvaluatedPlan], Iterable[TooLarge]]
    infeasible: list[TooLarge] = field(default_factory=list)

    def evaluated(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return the plan of a partition, None if it is not faster or does not fit."""
        if any(stage.is_in(cut) for stage in self.infeasible):
            return None
        search.extra_work += max(self.num_jobs, _LEAST_WORK)
        search.num_other_partitions += 1
        done = self.evaluate(cut)
        if done is not None and done.estimate.peak_bytes > search.memory_limit_bytes:
            self.infeasible.extend(self.infeasible_stages(cut, done))
            return None
        return done


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionsNode(Node[SearchState]):
    """All partitions of a configuration."""

    source: PartitionSource

    def refine(self, search: SearchState) -> Outcomes:
        """Yield, for each end of stage 0, the partitions with this end."""
        for problem in self.source.problems():
            partitions = KBestPartitions(problem, search.best_s)
            search.extra_work += partitions.num_runs / _RUNS_PER_JOB
            for row, bound in partitions.ends_of_first_stage():
                yield FirstStageNode(
                    bound=max(self.bound, bound),
                    wave=self.wave,
                    source=self.source,
                    partitions=partitions,
                    row=row,
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstStageNode(Node[SearchState]):
    """The partitions whose stage 0 ends at a row of its lane."""

    source: PartitionSource
    partitions: KBestPartitions
    row: int

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the sets by stage 0's recompute choice, after a pass of the dynamic program."""
        search.extra_work += self.partitions.num_runs / _RUNS_PER_JOB
        for some in self.partitions.with_first_stage(self.row):
            yield _first_stages_node(self, some)


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstStagesNode(Node[SearchState]):
    """The partitions with these first stages."""

    source: PartitionSource
    partitions: KBestPartitions
    some: FirstStages

    @property
    def depth(self) -> int:
        """How many stages are given."""
        return len(self.some.choices)

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the sets in which one more stage is given, or the evaluated plan."""
        search.extra_work += 1
        cut = self.partitions.partition(self.some)
        if cut is None:
            for some in self.partitions.split(self.some):
                yield _first_stages_node(self, some)
        elif (done := self.source.evaluated(search, cut)) is not None:
            yield done


def _first_stages_node(
    parent: FirstStageNode | FirstStagesNode, some: FirstStages
) -> FirstStagesNode:
    return FirstStagesNode(
        bound=max(parent.bound, some.bound),
        wave=parent.wave,
        source=parent.source,
        partitions=parent.partitions,
        some=some,
    )
