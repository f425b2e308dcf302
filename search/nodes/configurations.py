"""Nodes of one shape, one configuration, and one configuration with its stage boundaries.

    ShapeNode            configurations of equal degrees         bound phase: arithmetic
      ConfigurationNode  all stage boundaries                    partition phase: dynamic program
        PartitionedNode  the best boundaries under the bound     estimate phase: simulation
          EvaluatedPlan, and a PartitionsNode of all other boundaries (`partitions`)

The bound of each is no smaller than that of the one before. Where the estimate finds that a stage
is over the memory limit, the configuration is partitioned again without this stage. After too many
attempts the memory check becomes conservative: it refuses most of what does not fit, and perhaps
what does.

Interleaved stages (vpp > 1) have one partition only, as even as blocks allow (`interleaved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import ge

from costmodel import Estimate
from planner.plan import Plan
from planner.schedule import find_schedule
from search.branch_and_bound import EvaluatedPlan, Node
from search.candidates import in_flight_of
from search.ilp.joint import solve_by_joint_program
from search.nodes.partitions import PartitionsNode, PartitionSource
from search.partition.bisect import solve_by_bisection
from search.partition.chain_dp import solve_chain
from search.partition.chain_problem import ChainProblem, Cut, TooLarge
from search.search_state import PARTITIONS, Outcomes, SearchState
from search.space import Configuration, Shape
from search.stages.stage_table import StageTable
from search.warm_start import NodeKey

MOST_ATTEMPTS = 48
"""How often a configuration is partitioned again when its estimate is over the memory limit."""
MOST_CONSERVATIVE_ATTEMPTS = 8

EVEN_CUT_TOO_LARGE = "memory: the even cut or the whole chain does not fit"
IN_FLIGHT_TOO_LARGE = "memory: activations in flight"
FEWER_IN_FLIGHT_TOO_LARGE = "memory: a schedule that holds less does not fit either"
NO_BOUNDARIES_FIT = "memory: no stage boundaries fit"
BOUNDARIES_BEATEN = "stage boundaries: the best cut cannot beat the best"
PLAN_TOO_LARGE = "memory: the whole plan, rank by rank"

SOLVERS: dict[str, Callable[[ChainProblem], Cut | None]] = {
    "recursive": solve_by_bisection,
    "ilp": solve_by_joint_program,
}
"""Solvers of stage boundaries beside the dynamic program; a recursive cut proves nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShapeNode(Node[SearchState]):
    """A shape with one layout.

    A layout that was pruned before it was found is found where its table is needed.
    """

    shape: Shape
    find_table: Callable[[], StageTable]

    @property
    def table(self) -> StageTable:
        """The layout's table."""
        return self.find_table()

    @property
    def num_configurations(self) -> int:
        """Schedules and ZeRO stages."""
        return self.shape.num_configurations

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the configurations, each with its own bound."""
        table = self.table
        bounds, warm = search.candidates.bounds(table), search.warm_start
        for configuration in self.shape.configurations():
            own = bounds.least_step_s(configuration) if configuration.vpp == 1 else 0.0
            key = configuration, table.key
            yield ConfigurationNode(
                bound=max(self.bound, own, warm.bounds.get(key, 0.0)),
                wave=self.wave,
                configuration=configuration,
                table=table,
                infeasible=warm.infeasible.get(key, ()),
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfigurationNode(Node[SearchState]):
    """A configuration with one layout, and all its stage boundaries.

    Attributes:
        configuration: degrees, schedule, microbatches, ZeRO stage.
        table: what its blocks cost under the layout.
        infeasible: stages that the estimate found too large in earlier attempts.
        num_attempts: how often it was partitioned before.
    """

    configuration: Configuration
    table: StageTable
    infeasible: tuple[TooLarge, ...] = ()
    num_attempts: int = 0

    @property
    def num_configurations(self) -> int:
        """A single configuration."""
        return 1

    @property
    def label(self) -> str:
        """What is partitioned."""
        return f"cutting {self.configuration.label}"

    @property
    def key(self) -> NodeKey:
        """The configuration with its layout."""
        return self.configuration, self.table.key

    @property
    def is_conservative(self) -> bool:
        """Whether a partition must pass the conservative memory check."""
        return self.num_attempts > MOST_ATTEMPTS

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the configuration with its best stage boundaries, if any fit and may win."""
        if self.configuration.vpp > 1 or self.configuration.pp == 1:
            yield from self._only_partition(search)
        elif search.request.solver == "dp":
            yield from self._best_partition(search)
        else:
            yield from self._partition_of_other_solver(search)

    def _only_partition(self, search: SearchState) -> Outcomes:
        configuration, table, candidates = self.configuration, self.table, search.candidates
        if configuration.vpp > 1:
            least = candidates.interleaved(configuration, table).least_step_s(configuration)
            if least >= search.best_s:
                yield replace(self, bound=least)
                return
        cut = only_cut(search, configuration, table, self.infeasible)
        if cut is None:
            self._exclude(search, EVEN_CUT_TOO_LARGE)
        else:
            yield self._partitioned(cut, cut.value)

    def _best_partition(self, search: SearchState) -> Outcomes:
        in_flight = in_flight_of(self.configuration)
        if self._is_too_large(search, in_flight):
            return
        solved = solve_chain(self._problem(search), ceiling=search.best_s)
        if not solved.fits:
            if not self.infeasible:
                known = search.infeasible_in_flight.setdefault(self._memory_key, [])
                known.append(in_flight)
            self._exclude(search, NO_BOUNDARIES_FIT)
        elif solved.cut is None:
            self._exclude(search, BOUNDARIES_BEATEN, search.best_s)
        else:
            yield self._partitioned(solved.cut, solved.cut.value)

    def _partition_of_other_solver(self, search: SearchState) -> Outcomes:
        solver = search.request.solver
        if self._is_too_large(search, in_flight_of(self.configuration)):
            return
        cut = SOLVERS[solver](self._problem(search))
        if cut is None:
            search.prune(f"memory: {solver} found no stage boundaries")
        else:
            yield self._partitioned(cut, self.bound if solver == "recursive" else cut.value)

    def _is_too_large(self, search: SearchState, in_flight: tuple[int, ...]) -> bool:
        """Whether activations alone are over the limit; then the configuration is excluded."""
        bounds = search.candidates.bounds(self.table)
        if bounds.kept_bound(self.configuration, in_flight) > search.memory_limit_bytes:
            self._exclude(search, IN_FLIGHT_TOO_LARGE)
            return True
        known = search.infeasible_in_flight.get(self._memory_key, ())
        if any(all(map(ge, in_flight, fewer)) for fewer in known):
            self._exclude(search, FEWER_IN_FLIGHT_TOO_LARGE)
            return True
        return False

    @property
    def _memory_key(self) -> tuple:
        """All that a stage's memory depends on, beside the microbatches in flight."""
        one = self.configuration
        splits = find_schedule(one.schedule).splits_backward
        return self.table.key, one.dp, one.zero, one.pp, one.recompute, splits

    def _problem(self, search: SearchState) -> ChainProblem:
        return search.candidates.problem(
            self.configuration,
            self.table,
            search.memory_limit_bytes,
            infeasible=self.infeasible,
            is_conservative=self.is_conservative,
        )

    def _partitioned(self, cut: Cut, bound: float) -> PartitionedNode:
        bound = max(self.bound, bound)
        return PartitionedNode(bound=bound, wave=self.wave, of=replace(self, bound=bound), cut=cut)

    def _exclude(self, search: SearchState, rule: str, bound: float = float("inf")) -> None:
        """Prune the configuration: nothing that fits is faster than the bound."""
        search.prune(rule)
        # The conservative check may refuse what does fit.
        if not self.is_conservative:
            search.warm_start.raise_bound(self.key, bound)

    def again_without(self, search: SearchState, infeasible: tuple[TooLarge, ...]) -> Outcomes:
        """Yield the configuration, to be partitioned without stages that are too large.

        Its bound, the least of all partitions that were left, holds for those that still are.
        """
        if self.num_attempts == MOST_ATTEMPTS:
            # What the conservative check leaves out, and how fast that is, is unknown.
            search.leave_open(self.bound)
        if self.num_attempts == MOST_ATTEMPTS + MOST_CONSERVATIVE_ATTEMPTS:
            search.prune(PLAN_TOO_LARGE)
            return
        infeasible = (*self.infeasible, *infeasible)
        search.warm_start.infeasible[self.key] = infeasible
        if not self.is_conservative:
            search.warm_start.raise_bound(self.key, self.bound)
        yield replace(self, infeasible=infeasible, num_attempts=self.num_attempts + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionedNode(Node[SearchState]):
    """A configuration (`of`) with the stage boundaries of the least bound."""

    of: ConfigurationNode
    cut: Cut

    @property
    def configuration(self) -> Configuration:
        """Degrees, schedule, microbatches, ZeRO stage."""
        return self.of.configuration

    @property
    def num_configurations(self) -> int:
        """A single configuration."""
        return 1

    @property
    def label(self) -> str:
        """What is estimated."""
        return self.of.label

    def refine(self, search: SearchState) -> Outcomes:
        """Simulate; estimate in full, memory included, what may be the best or leaves a gap."""
        one, table, cut, candidates = self.configuration, self.of.table, self.cut, search.candidates
        is_interleaved = one.vpp > 1
        if is_interleaved:
            too_large = candidates.too_large_ranks(one, table, cut, search.memory_limit_bytes)
            if too_large:
                yield from self.of.again_without(search, too_large)
                return
        step_s = candidates.quick_step_s(one, table, cut)
        # Interleaved stages have this partition only; otherwise others may be faster.
        bound = step_s if is_interleaved else self.bound
        is_slower, almost_best_s = step_s >= search.best_s * (1 - 1e-9), search.best_s * (1 - 1e-9)
        if is_slower and bound >= almost_best_s:
            search.num_evaluated += 1
            search.lose(self, step_s)
            return
        done = evaluate(search, one, table, cut)
        if done.estimate.peak_bytes > search.memory_limit_bytes:
            too_large = infeasible_stages(search, one, table, cut, done)
            yield from self.of.again_without(search, too_large)
            return
        search.num_evaluated += 1
        if one.pp > 1 and not is_interleaved and not self.of.is_conservative and _lists(search):
            yield self._other_partitions(search)
        else:
            # Where skips reach past a stage the estimate has more terms than the simulation.
            search.leave_open(done.step_s if is_interleaved else bound)
        if is_slower:
            search.lose(self, step_s)
        else:
            yield done

    def _other_partitions(self, search: SearchState) -> PartitionsNode:
        """Return the stage boundaries beside this node's: the k best, as far as they may win."""
        node, one, table = self.of, self.configuration, self.of.table

        def evaluate_faster(cut: Cut) -> EvaluatedPlan | None:
            step_s = search.candidates.quick_step_s(one, table, cut)
            is_faster = step_s < search.best_s * (1 - 1e-9)
            return evaluate(search, one, table, cut) if is_faster else None

        source = PartitionSource(
            num_jobs=2 * one.pp * one.num_microbatches,
            problems=lambda: [node._problem(search)],
            evaluate=evaluate_faster,
            infeasible_stages=lambda cut, done: infeasible_stages(search, one, table, cut, done),
        )
        return PartitionsNode(bound=self.bound, wave=PARTITIONS, source=source)


def _lists(search: SearchState) -> bool:
    """Whether the solver of the request can list partitions in order of their bounds."""
    return search.request.solver == "dp"


def only_cut(
    search: SearchState,
    configuration: Configuration,
    table: StageTable,
    infeasible: tuple[TooLarge, ...] = (),
) -> Cut | None:
    """Return the one partition there is to try, None if it does not fit.

    That is a single stage, or interleaved stages as even as blocks allow.
    """
    candidates, limit = search.candidates, search.memory_limit_bytes
    if configuration.vpp == 1:
        return candidates.one_stage(configuration, table, limit, infeasible)
    return candidates.even_cut(configuration, table, limit, infeasible, ceiling=search.best_s)


def infeasible_stages(
    search: SearchState,
    configuration: Configuration,
    table: StageTable,
    cut: Cut,
    done: EvaluatedPlan,
) -> tuple[TooLarge, ...]:
    """Return the stages of an evaluated partition that are too large."""
    live = in_flight_of(configuration) if configuration.vpp == 1 else ()
    tables = (table,) * len(done.plan.stages)
    limit = search.memory_limit_bytes
    return tuple(too_large_stages(done.plan, done.estimate, cut, live, limit, tables))


def too_large_stages(
    plan: Plan,
    estimate: Estimate,
    cut: Cut,
    live: Sequence[int],
    limit_bytes: float,
    tables: Sequence[StageTable],
) -> Iterator[TooLarge]:
    """Yield the stages of a plan whose ranks are over the memory limit.

    A longer run of blocks holds all that a shorter one holds, except what its edges receive and
    send, and second copies of weights that blocks outside use too. A stage that is over by more
    than that excludes longer runs as well. `live` are the microbatches that each stage holds at
    most, none where ranks have several stages; `tables` are the stages'.
    """
    for index, stage in enumerate(plan.stages):
        over = int(estimate.memory[stage.pp_rank].total) - limit_bytes
        if over <= 0:
            continue
        first, end = stage.first_block, stage.last_block + 1
        yield TooLarge(
            stage=index,
            first=first,
            end=end,
            choice=cut.choices[index],
            and_longer=bool(live)
            and over > tables[index].most_edge_bytes(first, end, in_flight=live[index]),
        )


def evaluate(
    search: SearchState, configuration: Configuration, table: StageTable, cut: Cut
) -> EvaluatedPlan:
    """Return the plan of a partition with the cost model's estimate."""
    key = (configuration, table.key, cut.cuts, cut.choices)
    plans = search.warm_start.plans
    if key not in plans:
        plan = search.candidates.plan(configuration, table, cut)
        plans[key] = plan, search.candidates.estimate(plan)
    return evaluated_plan(configuration, *plans[key])


def evaluated_plan(configuration: Configuration, plan: Plan, estimate: Estimate) -> EvaluatedPlan:
    """Return a plan under its configuration, with the recompute that its stages ended up with."""
    used = {stage.recompute for stage in plan.stages}
    recompute = used.pop() if len(used) == 1 else "mixed"
    chosen = replace(configuration, recompute=recompute)
    return EvaluatedPlan(configuration=chosen, plan=plan, estimate=estimate)
