"""Pipelines, of one stage or more, whose stages have replicas on every group of devices.

A replica of the pipeline lies on one group from its first stage to its last, and meets the others
only in what they exchange: it is a plan of its own on n_g / pp devices of group g for each stage,
with its share of a microbatch (`costmodel.time.replica_views`). The step is that of the slowest.
So whatever bounds the partitions of one group's replicas bounds those of all:

    PipelinesNode     a shape with shares, a schedule and a ZeRO stage: the best partition of the
                      replicas whose bound is the highest
      PartitionsNode  the others in the order of that bound (`partitions`)

What a stage recomputes is the least with which it fits on every group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from costmodel.estimate import rank_bytes_by_group
from planner.errors import LayoutError
from search.branch_and_bound import EvaluatedPlan
from search.nodes.partitions import (
    JOBS_PER_ESTIMATE,
    PartitionableNode,
    PartitionsNode,
)
from search.partition.chain_dp import solve_chain
from search.partition.chain_problem import ChainProblem, Cut
from search.priced_configuration import PricedConfiguration
from search.search_state import PARTITIONS, PLACEMENTS, Outcomes, SearchState
from search.space.configuration import Configuration, recompute_choices
from search.stages.stage_table import StageTable

APART = "replicas on groups: the layout does not divide a share"
BEATEN = "replicas on groups: the best cut cannot beat the best"
TOO_LARGE = "memory: a share does not fit its devices"


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The pipeline as the replicas on one group of devices see it."""

    device_group: str
    configuration: Configuration
    """With the share of a replica as its microbatch."""
    table: StageTable
    """Of the group, at this share: of each stage so many ranks lie there as there are devices."""

    def problem(self, search: SearchState) -> ChainProblem:
        """Return the chain problem of these replicas."""
        # `is_mixed`: choices of whole stages alone, which `fitting` raises step by step, and no
        # waits for transfers in jobs.
        alone = PricedConfiguration(search.candidates, self.configuration, self.table)
        return alone.problem(search.limits[self.device_group], is_mixed=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelinesNode(PartitionableNode):
    """All stage boundaries of pipelines whose replicas take these shares."""

    views: tuple[View, ...]

    @property
    def label(self) -> str:
        """What is partitioned."""
        return f"trying {self.configuration.label}"

    @property
    def num_jobs(self) -> int:
        """What an evaluation costs: the memory and the time of each view, in simulated jobs."""
        return (JOBS_PER_ESTIMATE + super().num_jobs) * len(self.views)

    @cached_property
    def _made(self) -> list[ChainProblem]:
        """The problem that was solved."""
        return []

    def problems(self, search: SearchState) -> Sequence[ChainProblem]:
        """Return the chain problem of the replicas whose best partition has the highest bound."""
        return self._made

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the plan of the best partition, and all others."""
        # Without a pipeline all are evaluated: that is quick, and some become runners-up.
        ceiling = search.to_beat_s if self.configuration.pp > 1 else inf
        slowest: tuple[Cut, ChainProblem] | None = None
        for view in self.views:
            problem = view.problem(search)
            solved = solve_chain(problem, ceiling=ceiling)
            if solved.cut is None:
                search.prune(BEATEN if solved.fits else TOO_LARGE)
                return
            # The step is that of the slowest group: the highest of the groups' bounds bounds all.
            if slowest is None or solved.cut.value > slowest[0].value:
                slowest = solved.cut, problem
        assert slowest is not None, "a cluster of groups has some"
        cut, problem = slowest
        self._made[:] = [problem]
        search.num_evaluated += 1
        yield from self.fitting(search, cut)
        if self.configuration.pp > 1:
            yield Others(bound=max(self.bound, cut.value), wave=self.wave_of_others, of=self)

    def fitting(self, search: SearchState, cut: Cut) -> Iterator[EvaluatedPlan]:
        """Yield the plan of a partition in which stages that do not fit recompute more, until all
        do; none where that is not enough.
        """
        choices = recompute_choices(self.configuration.recompute)
        costs, ranks = search.candidates.costs, range(self.configuration.pp)
        priced = PricedConfiguration(search.candidates, self.configuration, self.views[0].table)
        try:
            while True:
                plan = priced.plan(cut)
                over = [
                    any(num_bytes > search.limits[name] for name, num_bytes in of_groups.items())
                    for of_groups in rank_bytes_by_group(plan, costs, ranks)
                ]
                if not any(over):
                    break
                # A stage's memory depends on its own recomputation
                # alone: those that are over go up a choice.
                more = tuple(at + is_over for at, is_over in zip(cut.choices, over, strict=True))
                if max(more) == len(choices):
                    return
                cut = replace(cut, choices=more)
            answer = search.candidates.estimate(plan)
        except LayoutError:
            return
        used = {stage.recompute for stage in plan.stages}
        configuration = replace(
            self.configuration, recompute=used.pop() if len(used) == 1 else "mixed"
        )
        yield EvaluatedPlan(configuration=configuration, plan=plan, estimate=answer)

    def simulate(self, search: SearchState, cut: Cut) -> float:
        """Return 0: only the estimate has all views."""
        return 0.0

    def evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return the plan of a partition, if it fits."""
        return next(self.fitting(search, cut), None)

    def tables(self, cut: Cut) -> Sequence[StageTable]:
        """Return the first view's table, for each stage."""
        return (self.views[0].table,) * len(cut.choices)


@dataclass(frozen=True, kw_only=True, eq=False)
class Others(PartitionsNode):
    """All partitions of such a pipeline."""

    def evaluate(self, search: SearchState, cut: Cut) -> Outcomes:
        """Yield the plan of a partition, if it fits."""
        search.extra_work += self.of.num_jobs
        search.num_other_partitions += 1
        done = self.of.evaluate(search, cut)
        if done is not None:
            yield done


def pipelines_node(
    configuration: Configuration,
    of_groups: Mapping[str, tuple[int, StageTable]],
    *,
    bound: float,
) -> PipelinesNode:
    """Return the node of a configuration; `of_groups` has the share of a replica on each group of
    devices and the group's table at it.
    """
    return PipelinesNode(
        bound=bound,
        # Those without a pipeline are first: they prune the others.
        wave=PLACEMENTS if configuration.pp == 1 else PARTITIONS,
        configuration=configuration,
        views=tuple(
            View(
                device_group=name,
                configuration=replace(configuration, microbatch_size=share, shares=()),
                table=table,
            )
            for name, (share, table) in of_groups.items()
        ),
    )
