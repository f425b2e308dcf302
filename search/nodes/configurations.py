"""Nodes of one shape and of one configuration.

    ShapeNode              configurations of equal degrees         bound phase: arithmetic
      ConfigurationNode    all stage boundaries                    partition phase: dynamic program
        PartitionedNode    the best boundaries under the bound     estimate phase (`partitions`)

The bound of each is no smaller than that of the one before. Interleaved stages (vpp > 1) have one
partition only, as even as blocks allow (`partition/interleaved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from search.branch_and_bound import EvaluatedPlan, Node, evaluated_plan
from search.nodes.exact_recompute import ExactRecompute
from search.nodes.lean_plan import note_too_large
from search.nodes.partitions import PartitionableNode
from search.partition.chain_problem import ChainProblem, Cut, InfeasibleStage
from search.partition.least_recompute import with_recompute
from search.partition.solvers import solve
from search.priced_configuration import PricedConfiguration
from search.request import INEXACT_SOLVER
from search.search_state import NodeKey, Outcomes, SearchState
from search.space.configuration import Configuration, Shape
from search.stages.stage_table import StageTable

EVEN_CUT_TOO_LARGE = "memory: the even cut or the whole chain does not fit"
NO_BOUNDARIES_FIT = "memory: no stage boundaries fit"
BOUNDARIES_BEATEN = "stage boundaries: the best cut cannot beat the best"


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapeNode(Node[SearchState]):
    """A shape with one layout.

    A layout that was pruned before it was found is found where its table is needed.
    """

    shape: Shape
    find_table: Callable[[], StageTable]
    num_tables: int = 1
    """Tables that the layout's table stands for."""

    @property
    def table(self) -> StageTable:
        """The layout's table."""
        return self.find_table()

    @property
    def num_configurations(self) -> int:
        """Schedules and ZeRO stages, under each table."""
        return self.shape.num_configurations * self.num_tables

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the configurations, each with its own bound."""
        table = self.table
        for configuration in self.shape.configurations():
            # A single stage is quick to look at; interleaved stages lie in one way only, which may
            # be another for each table.
            is_single = configuration.pp * configuration.vpp == 1
            is_cut = configuration.vpp > 1
            is_apart = is_single or (
                is_cut and not search.candidates.have_equal_cuts(configuration, table)
            )
            for own in table.members if is_apart else (table,):
                yield _configuration_node(self, search, configuration, own)

    def apart(self, search: SearchState) -> Iterator[ShapeNode]:
        """Yield the shape under each table that its table stands for."""
        for own in self.table.members:
            bound = max(self.bound, search.bounds(own).least_step_of_shape(self.shape))
            yield replace(self, bound=bound, find_table=partial(_same, own), num_tables=1)


def _same(table: StageTable) -> StageTable:
    return table


def _configuration_node(
    parent: Node[SearchState],
    search: SearchState,
    configuration: Configuration,
    table: StageTable,
    bound: float = 0.0,
) -> ConfigurationNode:
    """Return the node of a configuration that a parent holds, with what is known of it."""
    warm, key = search.warm_start, (configuration, table.key)
    # Bounds that read the schedule hold for one stage a rank; several lie in one way only.
    if configuration.vpp > 1:
        own = search.candidates.interleaved(configuration, table).least_step_s
    else:
        own = search.bounds(table).least_step_s(configuration)
    return ConfigurationNode(
        bound=max(parent.bound, bound, own, warm.bounds.get(key, 0.0)),
        wave=parent.wave,
        configuration=configuration,
        table=table,
        infeasible=warm.infeasible.get(key, ()),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfigurationNode(PartitionableNode):
    """A configuration with one layout (that of its table), and all its stage boundaries."""

    table: StageTable

    @property
    def num_tables(self) -> int:
        """Tables that its table stands for."""
        return len(self.table.members)

    @property
    def num_configurations(self) -> int:
        """One under each of them."""
        return self.num_tables

    @property
    def label(self) -> str:
        """What is partitioned."""
        return f"trying {self.configuration.label}"

    @property
    def key(self) -> NodeKey:
        """The configuration with its layout."""
        return self.configuration, self.table.key

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the configuration with its best stage boundaries, if any fit and may win."""
        if self.configuration.vpp > 1 or self.configuration.pp == 1:
            yield from self._only_partition(search)
        else:
            yield from self._best_partition(search)

    def apart(self, search: SearchState, bound: float = 0.0) -> Iterator[ConfigurationNode]:
        """Yield the configuration under each table that its table stands for; `bound` holds for
        all of them.
        """
        for own in self.table.members:
            yield _configuration_node(self, search, self.configuration, own, bound)

    def priced(self, search: SearchState) -> PricedConfiguration:
        """Return the configuration with its layout."""
        return PricedConfiguration(search.candidates, self.configuration, self.table)

    def _only_partition(self, search: SearchState) -> Outcomes:
        limit, ceiling = search.memory_limit_bytes, search.to_beat_s
        cut = self.priced(search).only_cut(limit, self.infeasible, ceiling=ceiling)
        if cut is None:
            self._exclude(search, EVEN_CUT_TOO_LARGE)
        elif cut.value >= search.to_beat_s:
            yield replace(self, bound=max(self.bound, cut.value))
        elif self.num_tables > 1:
            yield from self.apart(search, cut.value)
        else:
            yield self.partitioned(cut, cut.value)

    def _best_partition(self, search: SearchState) -> Outcomes:
        solver = search.request.solver
        solved = solve(self.problems(search)[0], solver=solver, ceiling=search.to_beat_s)
        if solved.cut is not None and self.num_tables > 1:
            yield from self.apart(search, solved.cut.value)
        elif solved.cut is not None:
            chosen = self.with_recompute(search, solved.cut)
            assert chosen is not None, "a solver leaves out what does not fit"
            # The value of a bisected cut is no bound of other cuts.
            yield self.partitioned(
                chosen, self.bound if solver == INEXACT_SOLVER else solved.cut.value
            )
        elif solver == INEXACT_SOLVER:
            search.prune(f"memory: {solver} found no stage boundaries", self.num_configurations)
        elif solved.fits:
            # Nothing that fits is under the ceiling: a bound that also holds under less memory.
            self._exclude(search, BOUNDARIES_BEATEN, search.to_beat_s)
        else:
            self._exclude(search, NO_BOUNDARIES_FIT)
            for _ in range(self.num_tables):
                note_too_large(search)

    def with_recompute(
        self, search: SearchState, cut: Cut, infeasible: Sequence[InfeasibleStage] = ()
    ) -> Cut | None:
        """Return a partition with the fastest recomputation of its stages that may fit."""
        if self.configuration.vpp > 1:
            return super().with_recompute(search, cut, infeasible)
        return with_recompute(self._problem(search, tuple(infeasible)), cut)

    def problems(self, search: SearchState) -> list[ChainProblem]:
        """Return the chain problem under the memory limit."""
        return [self._problem(search, ())]

    def _problem(
        self, search: SearchState, infeasible: tuple[InfeasibleStage, ...]
    ) -> ChainProblem:
        """Return the chain problem without stages that are infeasible, too."""
        known = (*self.infeasible, *infeasible)
        if known not in self._made:
            # A chain problem holds the costs of its windows: only the last is kept.
            self._made.clear()
            self._made[known] = self.priced(search).problem(
                search.memory_limit_bytes, infeasible=known
            )
        return self._made[known]

    @cached_property
    def _made(self) -> dict[tuple[InfeasibleStage, ...], ChainProblem]:
        """The last chain problem, by the infeasible stages it is without."""
        return {}

    def infeasible_stages(
        self, search: SearchState, cut: Cut, done: EvaluatedPlan
    ) -> tuple[InfeasibleStage, ...]:
        """Return the choices under which stages do not fit, by the exact memory model."""
        found = super().infeasible_stages(search, cut, done)
        exact = ExactRecompute(priced=self.priced(search), limit_bytes=search.memory_limit_bytes)
        if self.configuration.vpp > 1:
            # Stages of a rank share its memory, so levels are of ranks.
            ranks = sorted({done.plan.stages[known.stage].pp_rank for known in found})
            return tuple(exact.too_low(cut, ranks))
        problem = self._problem(search, ())
        return tuple(known for stage in found for known in exact.infeasible(problem, cut, stage))

    def simulate(self, search: SearchState, cut: Cut) -> float:
        """Return the step time of a partition's job table."""
        return self.priced(search).quick_step_s(cut)

    def evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan:
        """Return the plan of a partition with the cost model's estimate."""
        plans, key = search.warm_start.plans, (*self.key, cut.cuts, cut.choices, cut.until)
        if key not in plans:
            plan = self.priced(search).plan(cut)
            plans[key] = plan, search.candidates.estimate(plan)
        return evaluated_plan(self.configuration, *plans[key])

    def tables(self, cut: Cut) -> tuple[StageTable, ...]:
        """Return the table, for each stage."""
        return (self.table,) * len(cut.choices)

    def infeasible_ranks(self, search: SearchState, cut: Cut) -> tuple[InfeasibleStage, ...]:
        """Return interleaved stages of ranks that are too large by their job table."""
        told = search.warm_start.with_larger_shards(self.key)
        if found := tuple(known for known in told if self._rules_out(search, known, cut)):
            return found
        if self.configuration.vpp == 1:
            return ()
        return self.priced(search).infeasible_ranks(cut, search.memory_limit_bytes)

    def _rules_out(self, search: SearchState, known: InfeasibleStage, cut: Cut) -> bool:
        """Whether a cut has an infeasible stage: of several stages a rank, its rank's level or a
        lower one.
        """
        if self.configuration.vpp == 1:
            return known.is_in(cut)
        stages = self.priced(search).interleaved
        levels = stages.levels.of_cut(cut.choices, cut.until)
        return bool(levels[stages.cut.homes[known.stage]] <= known.choice)

    def _exclude(self, search: SearchState, rule: str, bound: float = float("inf")) -> None:
        """Prune the configuration: nothing that fits is faster than the bound."""
        search.prune(rule, self.num_configurations)
        search.warm_start.raise_bound(self.key, bound)

    def remember(self, search: SearchState) -> None:
        """Keep the stages that are too large, and the bound of what is left."""
        search.warm_start.note_infeasible(self.key, self.infeasible)
        search.warm_start.raise_bound(self.key, self.bound)
