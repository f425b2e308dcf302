"""The state of one search: the queue, what nodes of one request share, and the certificate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from costmodel import Estimate
from planner.language.layout.axes import Degrees
from planner.language.plan import Plan
from search.bounds.catalogue import DividedBounds, TableBounds
from search.branch_and_bound import BranchAndBound, EvaluatedPlan, Node, Wave
from search.candidates import Candidates
from search.partition.chain_problem import InfeasibleStage
from search.request import Certificate, SearchRequest
from search.space.configuration import BlockSizes, ButForCopies, Configuration, Shape
from search.stages.layout_candidates import LayoutCandidate
from search.stages.stage_table import StageTable, TableKey

_BOUNDARIES_PROOF = {
    "dp": "chain dynamic programming, path bound",
    "ilp": "joint integer program, path bound",
    "recursive": "nobody: recursive bisection is not exact",
}


NodeKey = tuple[Configuration, TableKey]
"""A configuration and the key of its stage table."""

CopiesKey = tuple[ButForCopies, Configuration, TableKey]
"""What is alike but for copies of shards, and the rest of a configuration and its layout."""

PlanKey = tuple[Configuration, TableKey, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A plan: configuration, key of the table, stage boundaries, recompute choices and the
blocks up to which stages recompute more."""


@dataclass(kw_only=True)
class WarmStart:
    """What one search leaves for the next one of the same candidates under less memory.

    A plan that did not fit does not fit in less memory either, and a lower bound of what fitted
    holds for the fewer plans that still do. A front of time against memory (`report/pareto`) is
    such a sequence of searches. Mutable: it grows with every search.

    Attributes:
        plans: evaluated plans with their estimates, fitting or not.
        bounds: step time (s) below which nothing of a configuration fits; infinity: nothing fits.
        infeasible: stages of a configuration that are too large.
        by_copies: the same, by what configurations share that differ in copies of shards, and by
            the number of these.
        needs_every_size: whether a search had to look at larger, slower microbatches.
    """

    plans: dict[PlanKey, tuple[Plan, Estimate]] = field(default_factory=dict)
    bounds: dict[NodeKey, float] = field(default_factory=dict)
    infeasible: dict[NodeKey, tuple[InfeasibleStage, ...]] = field(default_factory=dict)
    by_copies: dict[CopiesKey, dict[int, tuple[InfeasibleStage, ...]]] = field(default_factory=dict)
    needs_every_size: bool = False

    def note_infeasible(self, key: NodeKey, infeasible: tuple[InfeasibleStage, ...]) -> None:
        """Remember which stages of a configuration are too large."""
        self.infeasible[key] = infeasible
        by_copies = self.by_copies.setdefault(_copies_key(key), {})
        by_copies[key[0].degrees["rp"]] = infeasible

    def with_larger_shards(self, key: NodeKey) -> Iterator[InfeasibleStage]:
        """Yield the stages that are too large with fewer copies of shards: with as many as the
        configuration has each shard is larger, and all else as large.
        """
        for copies, infeasible in self.by_copies.get(_copies_key(key), {}).items():
            if copies < key[0].degrees["rp"]:
                yield from infeasible

    def fastest(self, limit_bytes: float) -> tuple[Configuration, Plan, Estimate] | None:
        """Return the fastest evaluated plan that fits, if any does."""
        fitting = [
            (estimate.step_s, estimate.peak_bytes, key[0], plan, estimate)
            for key, (plan, estimate) in self.plans.items()
            if estimate.peak_bytes <= limit_bytes
        ]
        if not fitting:
            return None
        _, _, configuration, plan, estimate = min(fitting, key=lambda entry: entry[:2])
        return configuration, plan, estimate

    def raise_bound(self, key: NodeKey, bound: float) -> None:
        """Remember that nothing of a configuration fits and is faster."""
        self.bounds[key] = max(bound, self.bounds.get(key, 0.0))


def _copies_key(key: NodeKey) -> CopiesKey:
    configuration, table = key
    # With as many replicas, degrees that differ in copies of shards alone are equal without them.
    alike = replace(configuration, degrees=Degrees())
    return configuration.but_for_copies, alike, table


OfBlocks = tuple[int, int, int, int, int]
"""Degrees that blocks' programs depend on (`BlockSizes.degrees`)."""


@dataclass(kw_only=True)
class SearchState(BranchAndBound):
    """A branch and bound over the plans of one request.

    Attributes:
        candidates: prices of the model on the machine.
        request: what the user fixed and allowed.
        memory_limit_bytes: of one device.
        limits: of one device of each group, by the group's name; "" where all devices are equal.
        every_size: whether larger microbatches are tried even where they are no faster.
        warm_start: bounds and plans of earlier searches under more memory.
        num_other_partitions: plans evaluated beside the best partition of a configuration.
        per_sample_s: least seconds of one sample through all blocks, by the sizes of blocks.
        least_per_sample_s: the same, with layouts that were pruned before they were priced.
        skipped_sizes: sizes of blocks that a rule left out.
        num_too_large: partitions that did not fit, and configurations without any that does.
    """

    candidates: Candidates
    request: SearchRequest
    memory_limit_bytes: float
    limits: Mapping[str, float]
    every_size: bool = False
    warm_start: WarmStart = field(default_factory=WarmStart)
    num_other_partitions: int = 0
    per_sample_s: dict[OfBlocks, float] = field(default_factory=dict)
    least_per_sample_s: dict[OfBlocks, float] = field(default_factory=dict)
    skipped_sizes: set[BlockSizes] = field(default_factory=set)
    num_too_large: int = 0
    without_cp: dict[BlockSizes, tuple[LayoutCandidate | StageTable, ...]] = field(
        default_factory=dict
    )
    """Layouts of sizes without cp: their tables, or what was beaten before it was priced."""
    _bounds: dict[TableKey, TableBounds] = field(default_factory=dict)
    """Bounds of each table's configurations."""
    _divided: dict[tuple[TableKey, int], DividedBounds] = field(default_factory=dict)
    """The same of what cp makes of a table without it, by its size."""

    def fits(self, done: EvaluatedPlan) -> bool:
        """Whether each rank of a plan is within the memory of its devices."""
        memory, groups = done.estimate.memory, done.plan.device_groups
        return all(
            int(parts.total) <= self.limits[group]
            for parts, group in zip(memory, groups, strict=True)
        )

    def bounds(self, table: StageTable) -> TableBounds:
        """Return the bounds of a table's configurations."""
        if table.key not in self._bounds:
            self._bounds[table.key] = TableBounds(table=table)
        return self._bounds[table.key]

    def least_with_cp_s(self, shape: Shape) -> float:
        """Return a step time that a shape with cp cannot beat, 0 where nothing is known: its blocks
        take at best a cp-th of what they take without it.
        """
        without = self.without_cp.get(shape.block_sizes.with_whole_sequences, ())
        return min((self._least_divided_s(layout, shape) for layout in without), default=0.0)

    def _least_divided_s(self, layout: LayoutCandidate | StageTable, shape: Shape) -> float:
        """Return the least step time of a shape whose cp divides at best all of a layout's work."""
        if isinstance(layout, LayoutCandidate):
            least_s = layout.least_s / shape.sequence_parts
            return replace(layout, least_s=least_s).least_step_s(shape)
        key = layout.key, shape.sequence_parts
        if key not in self._divided:
            self._divided[key] = DividedBounds(table=layout, parts=shape.sequence_parts)
        return self._divided[key].least_step_of_shape(shape)

    def certificate(self, best: EvaluatedPlan) -> Certificate:
        """Return what is proved of the best plan so far, and by whom."""
        boundaries = _BOUNDARIES_PROOF[self.request.solver]
        if self.num_other_partitions:
            boundaries += f"; {self.num_other_partitions} more cuts simulated"
        order = "list scheduling, event simulator" if best.plan.table else "event simulator"
        return Certificate(
            best_s=self.best_s,
            lower_bound_s=self.lower_bound_s,
            considered=self.num_considered,
            evaluated=self.num_evaluated,
            unexplored=self.num_unexplored + self.num_waiting,
            pruned=tuple(sorted(self.pruned.items())),
            proved_by=(
                ("degrees, microbatches and schedules", "branch and bound"),
                ("stage boundaries", boundaries),
                *[("stages' own meshes", "branch and bound")] * (self.request.meshes == "own"),
                *[("order of device groups", "all tried")] * ("" not in self.limits),
                ("placements in blocks", self.candidates.layouts.solver.proof),
                ("order of the best", order),
            ),
            stopped_early=self.stopped_early,
            placements_gap=max(solver.gap for solver in self.candidates.solvers),
        )


Outcomes = Iterator[Node[SearchState] | EvaluatedPlan]
"""What a node is refined to."""

# Waves, in the order of the search. Plans without cp and ep come before those with them, and plans
# without a pipeline before those with one: they are the quicker to evaluate. What closes the gap of
# evaluated configurations, and what mixes the meshes of stages, needs a good plan to prune with.
PLACEMENTS: Wave = (0,)
PARTITIONS: Wave = (2,)
MIXES: Wave = (3,)
MIXED_PARTITIONS: Wave = (4,)


def _is_late(sizes: BlockSizes) -> int:
    return int(sizes.cp * sizes.hp > 1 or sizes.ep > 1)


def degrees_wave(sizes: BlockSizes) -> Wave:
    """Return the wave of all shapes with or without cp and ep."""
    return (_is_late(sizes),)


def sizes_wave(sizes: BlockSizes) -> Wave:
    """Return the wave in which the microbatch sizes of these degrees are priced."""
    return (_is_late(sizes), 0, *sizes.degrees, 0)


def shapes_wave(sizes: BlockSizes, pp: int) -> Wave:
    """Return the wave of these degrees' configurations."""
    late = _is_late(sizes)
    return (late, 0, *sizes.degrees, 1) if pp == 1 else (late, 1)
