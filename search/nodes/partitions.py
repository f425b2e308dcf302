"""Nodes of stage boundaries: the best partition of a configuration or a mix, then the k best.

    PartitionableNode      all partitions of a configuration or of a mix of meshes    (abstract)
      PartitionedNode      the partition of the least bound: simulated, estimated
      PartitionsNode       all other partitions: they close the gap that the estimate leaves
        FirstStagesNode    those whose first stages are given, at first the end of stage 0 alone;
                           all given: a plan to evaluate

Where the estimate finds a stage over the memory limit, the node is partitioned again without this
stage. After too many attempts it is left with a gap.

A configuration is counted when its best partition is evaluated. The nodes of the k best count for
none, and stop after `MOST_EXTRA_WORK`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from search.branch_and_bound import EvaluatedPlan, Node, Wave
from search.nodes.lean_plan import note_too_large
from search.partition.chain_problem import ChainProblem, Cut, InfeasibleStage
from search.partition.k_best import FirstStages, KBestPartitions
from search.request import INEXACT_SOLVER
from search.search_state import PARTITIONS, Outcomes, SearchState
from search.space.configuration import Configuration
from search.space.job_tables import in_flight_of
from search.stages.stage_table import StageTable

_MOST_ATTEMPTS = 48
"""How often a node is partitioned again when its estimate is over the memory limit."""

JOBS_PER_ESTIMATE = 2000
"""What an estimate costs beside its simulation, in simulated jobs."""
_LEAST_WORK = 200
"""What the shortest simulation costs, in simulated jobs."""
_RUNS_PER_JOB = 200
"""Runs of blocks that the dynamic program visits in the time of one simulated job."""

PLAN_TOO_LARGE = "memory: the whole plan, rank by rank"
APART = "own meshes: stages cannot hand samples over, or share weights, between them"


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionableNode(Node[SearchState]):
    """All stage boundaries of a configuration, or of a mix of configurations.

    Attributes:
        configuration: degrees, schedule, microbatches; of a mix, those of its first member.
        infeasible: stages that the estimate found too large in earlier attempts.
        num_attempts: how often the node was partitioned before.
    """

    configuration: Configuration
    infeasible: tuple[InfeasibleStage, ...] = ()
    num_attempts: int = 0

    @abstractmethod
    def problems(self, search: SearchState) -> Sequence[ChainProblem]:
        """Return chain problems that cover all partitions, each partition in one of them."""

    @abstractmethod
    def simulate(self, search: SearchState, cut: Cut) -> float:
        """Return the step time of a partition's job table; 0 where only the estimate has it."""

    @abstractmethod
    def evaluate(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return a partition's plan; None if its stages cannot work with each other."""

    @abstractmethod
    def tables(self, cut: Cut) -> Sequence[StageTable]:
        """Return the table of each stage of a partition."""

    @property
    def num_jobs(self) -> int:
        """What an evaluation costs, in simulated jobs."""
        return self.configuration.num_jobs

    @property
    def wave_of_others(self) -> Wave:
        """When the partitions beside the best are listed."""
        return PARTITIONS

    @property
    def num_configurations(self) -> int:
        """A single configuration."""
        return 1

    def infeasible_ranks(self, search: SearchState, cut: Cut) -> tuple[InfeasibleStage, ...]:
        """Return stages of ranks that are too large by their job table, before any estimate."""
        return ()

    def remember(self, search: SearchState) -> None:
        """Keep what later searches under less memory need not find again."""

    def with_recompute(
        self, search: SearchState, cut: Cut, infeasible: Sequence[InfeasibleStage] = ()
    ) -> Cut | None:
        """Return a partition with the fastest recomputation of its stages that may fit beside what
        is known to be infeasible; None where some stage has none.
        """
        return None if any(stage.is_in(cut) for stage in infeasible) else cut

    def partitioned(self, cut: Cut, bound: float) -> PartitionedNode:
        """Return the node with stage boundaries of this bound, the least of all."""
        # A bound of all plans of a node holds for each of
        # its plans: it never falls on the way down.
        bound = max(self.bound, bound)
        return PartitionedNode(bound=bound, wave=self.wave, of=replace(self, bound=bound), cut=cut)

    def evaluate_faster(self, search: SearchState, cut: Cut) -> EvaluatedPlan | None:
        """Return a partition's plan; None if its simulation is no faster than the best."""
        # The same sum in another order may differ in its last digits: that is no faster plan.
        if self.simulate(search, cut) >= search.to_beat_s * (1 - 1e-9):
            return None
        return self.evaluate(search, cut)

    def infeasible_stages(
        self, search: SearchState, cut: Cut, done: EvaluatedPlan
    ) -> tuple[InfeasibleStage, ...]:
        """Return the stages of an evaluated partition that are too large."""
        configuration = self.configuration
        live = in_flight_of(configuration) if configuration.vpp == 1 else ()
        return tuple(infeasible_stages(done, cut, live, search.limits, self.tables(cut)))

    def again_without(self, search: SearchState, infeasible: Sequence[InfeasibleStage]) -> Outcomes:
        """Yield the node, to be partitioned without stages that are too large.

        Its bound, the least of all partitions that were left, holds for those that still are.
        """
        note_too_large(search)
        if self.num_attempts == _MOST_ATTEMPTS:
            # Partitions are left that were not looked at: they stay open at the node's bound.
            search.leave_open(self.bound)
            search.prune(PLAN_TOO_LARGE)
            return
        node = replace(self, infeasible=(*self.infeasible, *infeasible))
        node.remember(search)
        yield replace(node, num_attempts=self.num_attempts + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionedNode(Node[SearchState]):
    """A configuration or mix (`of`) with the stage boundaries of the least bound."""

    of: PartitionableNode
    cut: Cut

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
        of, cut = self.of, self.cut
        if too_large := of.infeasible_ranks(search, cut):
            yield from of.again_without(search, too_large)
            return
        almost_best_s = search.to_beat_s * (1 - 1e-9)
        step_s, is_interleaved = of.simulate(search, cut), of.configuration.vpp > 1
        # Simulated, the partition itself may be slower than its bound, and others not.
        # Interleaved stages have this partition only; otherwise others may be faster.
        bound = step_s if is_interleaved else self.bound
        if min(step_s, bound) >= almost_best_s:
            search.num_evaluated += 1
            search.lose(self, step_s)
            return
        done = of.evaluate(search, cut)
        if done is None:
            search.prune(APART)
        elif not search.fits(done):
            yield from of.again_without(search, of.infeasible_stages(search, cut, done))
            return
        else:
            search.num_evaluated += 1
        # Bisection has no bounds to list other partitions by: its configurations stay open.
        is_listed = of.configuration.pp > 1 and not is_interleaved
        if is_listed and search.request.solver != INEXACT_SOLVER:
            yield PartitionsNode(bound=self.bound, wave=of.wave_of_others, of=of)
        else:
            # Where skips reach past a stage the estimate has more terms than the simulation.
            search.leave_open(done.step_s if done is not None and is_interleaved else bound)
        if step_s >= almost_best_s:
            search.lose(self, step_s)
        elif done is not None:
            yield done


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionsNode(Node[SearchState]):
    """All partitions of an evaluated node; `infeasible` stages are found while they are tried."""

    of: PartitionableNode
    infeasible: list[InfeasibleStage] = field(default_factory=list)

    def refine(self, search: SearchState) -> Outcomes:
        """Yield, for each end of stage 0, the partitions with this end."""
        for problem in self.of.problems(search):
            # One set for each end of stage 0, as its tail is part of the paths of all other stages.
            partitions = KBestPartitions(problem, search.to_beat_s)
            search.extra_work += partitions.num_runs / _RUNS_PER_JOB
            for some in partitions.by_first_end():
                yield _first_stages_node(self, self, partitions, some)

    def evaluate(self, search: SearchState, cut: Cut) -> Outcomes:
        """Yield the plan of a partition if it may be the best and fits; where it does not, with
        more recomputation.
        """
        while (chosen := self.of.with_recompute(search, cut, self.infeasible)) is not None:
            search.extra_work += max(self.of.num_jobs, _LEAST_WORK)
            search.num_other_partitions += 1
            done = self.of.evaluate_faster(search, chosen)
            if done is None:
                return
            if search.fits(done):
                yield done
                return
            # Shared by all partitions of the node: no later one takes the stage as it was.
            self.infeasible.extend(self.of.infeasible_stages(search, chosen, done))


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstStagesNode(Node[SearchState]):
    """The partitions (of `all`) with these first stages, or whose stage 0 ends at a given block."""

    all: PartitionsNode
    partitions: KBestPartitions
    some: FirstStages

    @property
    def depth(self) -> int:
        """How many stages are given."""
        return len(self.some.choices)

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the sets in which one more stage is given, or the evaluated plan."""
        partitions, some = self.partitions, self.some
        # The first split of an end of stage 0 takes a pass of the dynamic program, others O(n).
        search.extra_work += 1 if some.choices else partitions.num_runs / _RUNS_PER_JOB
        cut = partitions.partition(some)
        if cut is not None:
            yield from self.all.evaluate(search, cut)
            return
        for smaller in partitions.split(some):
            yield _first_stages_node(self, self.all, partitions, smaller)


def _first_stages_node(
    parent: Node, every: PartitionsNode, partitions: KBestPartitions, some: FirstStages
) -> FirstStagesNode:
    bound = max(parent.bound, some.bound)
    return FirstStagesNode(
        bound=bound, wave=parent.wave, all=every, partitions=partitions, some=some
    )


def infeasible_stages(
    done: EvaluatedPlan,
    cut: Cut,
    live: Sequence[int],
    limits: Mapping[str, float],
    tables: Sequence[StageTable],
) -> Iterator[InfeasibleStage]:
    """Yield the stages of a plan whose ranks are over the memory limit of their devices.

    A longer run of blocks holds all that a shorter one holds, except what its edges receive and
    send, and second copies of weights that blocks outside use too. A stage that is over by more
    than that excludes longer runs as well. `live` are the microbatches that each stage holds at
    most, none where ranks have several stages; `tables` are the stages'.
    """
    for index, stage in enumerate(done.plan.stages):
        over = int(done.estimate.memory[stage.pp_rank].total) - limits[stage.device_group]
        if over <= 0:
            continue
        first, end = stage.first_block, stage.last_block + 1
        yield InfeasibleStage(
            stage=index,
            first=first,
            end=end,
            choice=cut.choices[index],
            # Only messages and copies at its edges can make a longer run need less than a shorter.
            and_longer=bool(live)
            and over
            > tables[index].most_edge_bytes(
                first, end, in_flight=live[index], receive_ahead=done.plan.receive_ahead
            ),
            repeats=tables[index].repetition.part if live else (0, 0, 1),
        )
