"""CostCache: whatever is expensive to price about a graph on a machine is priced once.

A block's price depends on its class, the microbatch size, and the class's layouts on the axes that
blocks are lowered on with the sizes of these, never on where in the model it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from costmodel.execution import Execution, find_execution
from costmodel.execution.dispatch.imbalance import Imbalance, experts_per_token, most_rows
from costmodel.execution.executed import rated_profile
from costmodel.execution.executed_program import price_program
from costmodel.execution.own_modules import with_own_modules
from costmodel.execution.rings import with_rings
from costmodel.execution.saves import (
    as_saved,
    casts_made_again,
    saved_instead,
    with_sized_losses,
)
from costmodel.links import Links, SideValues, find_links, find_side_values
from costmodel.memory.block.block_bytes import block_bytes, block_load
from costmodel.memory.block.placed_block import BlockBytes
from costmodel.time.block.moved import BlockMoved
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.times import RunTimes
from costmodel.time.tables import table_seconds
from costmodel.topology import lowered_groups, ranks_of_stage
from planner.deadline import check_time
from planner.errors import PlanError
from planner.language.graph import ModelGraph, Program
from planner.language.layout.axes import FOLDED, Degrees, lowered_axes
from planner.language.lowering.experts import grouped_products, spread_experts
from planner.language.lowering.lowering import lower
from planner.language.lowering.passes.losses_in_chunks import CROSS_ENTROPY, with_losses_in_chunks
from planner.language.ops.recompute_choice import ops_made_again
from planner.language.ops.record import why_eager
from planner.language.plan import OURS, ClassLayout, Recompute
from profiles import Profile

T = TypeVar("T")


class BlockPrice(NamedTuple):
    """One forward and one backward of a block on one rank."""

    times: RunTimes
    """Its seconds."""
    moved: BlockMoved
    """Its collectives."""
    load: StageLoad
    """Its bytes."""
    has_backward: bool
    """Whether a gradient arrives at all: before a model's first trained parameter none does."""
    side_positions: tuple[int, ...]
    """Inputs that it keeps and that need no gradient (rotary tables, masks), by position."""
    dispatcher: str
    """What brings rows to its experts; "" where none are exchanged."""
    activations: tuple[tuple[int, int, bool], ...]
    """(Position, bytes, whether it is kept without recomputation) of the other inputs."""
    spread: frozenset[int]
    """Parameters that lie on the experts' mesh, by position."""


class CostCache:
    """Prices of a graph's block classes on one profile. Mutable: it remembers answers.

    Says also what kind of step is priced: the runtime's whose `execution` it is (if not given,
    ours), whether it `clips_gradients`, and the `imbalance` of its routers (the execution's where
    not given). In a cluster of several groups of devices, `groups` has
    the prices on each of them, of as many devices as `group_sizes` says, and this one those on the
    first. Where ranks lie on these devices, and which of them exchange over which links, is asked
    of `cluster`: it differs from the profile's where stages have a part of their ranks here.
    """

    def __init__(
        self,
        graph: ModelGraph,
        profile: Profile,
        *,
        execution: Execution | None = None,
        clips_gradients: bool = False,
        imbalance: Imbalance | None = None,
    ) -> None:
        self.groups: Mapping[str, CostCache] = {}
        self.group_sizes: Mapping[str, int] = {}
        self.graph, self.profile = graph, profile
        self.cluster = profile.cluster
        self.execution = execution or find_execution(OURS)
        self.clips_gradients = clips_gradients
        self.imbalance = imbalance or Imbalance(self.execution.expert_imbalance)
        self._batch_inputs: dict[int, frozenset[str]] = {}
        self._bound: dict[tuple[int, int], Program] = {}
        self._local: dict[tuple, Program] = {}
        self._blocks: dict[tuple, BlockPrice] = {}
        self._loads: dict[tuple, StageLoad] = {}
        self._bytes: dict[tuple, BlockBytes] = {}
        self._side_values: dict[int, SideValues] = {}
        self._made: dict[Hashable, Any] = {}
        self._most_rows: dict[tuple[int, int], float] = {}

    def on(self, profile: Profile) -> CostCache:
        """Return prices of the same step on another profile of the same machine.

        Both share what no time changes: the programs of ranks and the bytes of blocks.
        """
        other = CostCache(
            self.graph,
            profile,
            execution=self.execution,
            clips_gradients=self.clips_gradients,
            imbalance=self.imbalance,
        )
        other.links, other._batch_inputs = self.links, self._batch_inputs
        other._bound, other._local = self._bound, self._local
        other._bytes, other._loads = self._bytes, self._loads
        other._side_values = self._side_values
        return other

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` makes, the first time it is asked for under a key.

        What rooms above price with these answers is kept so for as long as the answers are.
        """
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def of_group(self, name: str) -> CostCache:
        """Return the prices on a group of devices of the cluster; "" where all devices are equal.

        Raises PlanError where the cluster has no such group.
        """
        if name in self.groups:
            return self.groups[name]
        if name or self.groups:
            lies = f"on devices of group {name!r}" if name else "on devices of no named group"
            known = f"has groups {', '.join(self.groups)}" if self.groups else "has no groups"
            raise PlanError(
                f"a stage of the plan lies {lies} and the cluster {self.profile.name!r} {known}; "
                "give the `cluster` file that the plan was searched for"
            )
        return self

    def with_stage_ranks(self, on_groups: Mapping[str, int]) -> CostCache:
        """Return the prices for a plan that has so many ranks of a stage on each of these groups of
        devices, and others elsewhere.
        """
        if not on_groups:
            return self
        seen = copy(self)
        seen.groups = {
            name: each.part(on_groups[name]) if name in on_groups else each
            for name, each in self.groups.items()
        }
        return seen

    def part(self, stage_ranks: int) -> CostCache:
        """Return the prices on these devices for stages of which so many ranks, not all, lie here.

        Blocks lie inside of a replica, which is not divided, so both share what blocks take.
        """

        def part() -> CostCache:
            of_part = copy(self)
            of_part.cluster = replace(self.cluster, stage_ranks=stage_ranks)
            of_part._made = {}
            return of_part

        return self.once(("part", stage_ranks), part)

    @property
    def compiles(self) -> bool:
        """Whether this project's runtime compiles blocks."""
        return self.execution.kernels == "fused" and self.execution.prices == "profile"

    @property
    def adds_ops(self) -> bool:
        """Whether a block takes the sum of its ops, each priced alone, and its corrections: as
        eager kernels do, and not what other runtimes fuse.
        """
        return self.execution.kernels != "fused" and self.execution.prices == "profile"

    @property
    def job_issue_s(self) -> float:
        """Seconds in which the host issues what a job of a stage takes beside its blocks; 0 of our
        runtime, whose profile has no such part.
        """
        if self.execution.prices == "profile":
            return 0.0
        return self.execution.job_kernels * rated_profile(self.profile).rates.issue_s

    @cached_property
    def links(self) -> Links:
        """How the graph's blocks hang together."""
        return find_links(self.graph)

    def polls(self, degrees: Degrees, *, pp: int) -> bool:
        """Whether hosts that poll for messages between stages are late for collectives.

        `degrees` are of the whole mesh: pipelines that stay in a node send over its own links.
        """
        if not self.execution.polled_late_s:
            return False
        return self.cluster.spans_nodes(pp, stride=ranks_of_stage(self.cluster, degrees.num_ranks))

    def bound(self, class_index: int, microbatch_size: int) -> Program:
        """Return a class's program at a microbatch size."""
        key = class_index, microbatch_size
        if key not in self._bound:
            self._bound[key] = self.graph.classes[class_index].bind(microbatch_size)
        return self._bound[key]

    def local(
        self,
        class_index: int,
        microbatch_size: int,
        degrees: Degrees | None = None,
        layouts: tuple[ClassLayout, ...] = (),
        *,
        logit_rows: int = 0,
    ) -> Program:
        """Return a class's program as one rank runs it, lowered as `local_program` does.

        `degrees` are sizes of the mesh, 1 where not given; `layouts` are the class's own, one an
        axis: where an axis has none, blocks are replicated. `logit_rows` are a plan's.
        """
        return self._on_fullest(
            class_index, microbatch_size, degrees, layouts, logit_rows=logit_rows, held=False
        )

    def _on_fullest(
        self,
        class_index: int,
        microbatch_size: int,
        degrees: Degrees | None,
        layouts: tuple[ClassLayout, ...],
        *,
        logit_rows: int,
        held: bool,
    ) -> Program:
        """Return what the rank runs whose experts receive most rows: as many as time has, or as are
        `held` in memory.
        """
        degrees = degrees or Degrees()
        fullest = self.fullest(class_index, microbatch_size, degrees["ep"], held=held)
        rows = self._logit_rows(class_index, logit_rows)
        key = *self._key(class_index, microbatch_size, degrees, layouts), rows, fullest
        if key not in self._local:
            check_time()
            placed = {layout.axis: layout for layout in layouts}
            program = self.lowered(class_index, microbatch_size, degrees, layouts)
            executes = self.execution
            if executes.prices == "rates":
                program = with_own_modules(program)
            # After the modules: these rewrite attention as it was captured, which a ring replaces.
            if executes.rings_attention:
                program = with_rings(program, degrees["cp"])
            if executes.prices == "rates":
                program = with_sized_losses(program, executes.loss_bytes)
            program = spread_experts(
                program,
                degrees["ep"],
                etp=degrees["etp"],
                fullest=fullest,
                layout=placed.get("ep"),
            )
            self._local[key] = with_losses_in_chunks(program, rows)
        return self._local[key]

    def lowered(
        self,
        class_index: int,
        microbatch_size: int,
        degrees: Degrees,
        layouts: tuple[ClassLayout, ...],
    ) -> Program:
        """Return a class's program lowered on each axis, before a runtime's own modules take the
        place of ops: what another layout is made of.
        """
        placed = {layout.axis: layout for layout in layouts}
        program = self.bound(class_index, microbatch_size)
        # Innermost axis first: where two axes cut one dim, it cuts the coarse pieces.
        for axis in lowered_axes():
            program = lower(
                program,
                placed.get(axis.name),
                axis=axis.name,
                axis_size=degrees[axis.name],
                sum_later=axis.whole_params,
            )
        return program

    def fullest(self, class_index: int, microbatch_size: int, ranks: int, *, held: bool) -> float:
        """Return the rows of the rank of an exchange that receives most, over the mean: as time has
        them, or as they are `held` in memory.
        """
        if ranks == 1 or class_index not in self._of_experts:
            return 1.0
        key = class_index, ranks
        if key not in self._most_rows:
            self._most_rows[key] = most_rows(self.bound(class_index, microbatch_size), ranks)
        of = self.imbalance.of_memory if held else self.imbalance.of_time
        return of(ranks, most=self._most_rows[key])

    def block(
        self,
        class_index: int,
        microbatch_size: int,
        degrees: Degrees | None = None,
        layouts: tuple[ClassLayout, ...] = (),
        *,
        recomputed: tuple[str, ...] | None = None,
        polls: bool = False,
        beside: bool = False,
        pieces: int = 1,
        logit_rows: int = 0,
    ) -> BlockPrice:
        """Return the price of one block of a class.

        `recomputed` names the ops that selective recomputation runs again (None: the
        default choice); `polls`, `beside`, `pieces` and `logit_rows` are as in `Split`.
        """
        degrees = degrees or Degrees()
        rows = self._logit_rows(class_index, logit_rows)
        of_class = class_index, microbatch_size, degrees, layouts
        key = *self._key(*of_class), recomputed, polls, beside, rows, pieces
        if key not in self._blocks:
            local = self.local(*of_class, logit_rows=rows)
            # Each of these steps may take long for a large block, so the time is checked between.
            held = self.block_bytes(*of_class, beside=beside, logit_rows=rows)
            again = self._made_again(class_index, microbatch_size, held.saved.program, recomputed)
            check_time()
            # No profile's times change bytes, so a cache of another profile may have them (`on`).
            if key not in self._loads:
                self._loads[key] = block_load(held, again)
            check_time()
            times, dispatcher, moved = price_program(
                local,
                self.profile,
                axes=lowered_groups(self.profile.cluster, degrees),
                execution=self.execution,
                recomputed=again,
                polls=polls,
                beside=beside,
                pieces=pieces,
            )
            self._blocks[key] = BlockPrice(
                times=_with_tables(times, local, self.profile),
                moved=moved,
                dispatcher=dispatcher,
                load=self._loads[key],
                has_backward=any(edge.requires_grad for edge in held.outputs),
                side_positions=tuple(
                    position
                    for position, edge in enumerate(held.inputs)
                    if edge.is_kept and not edge.requires_grad
                ),
                activations=tuple(
                    (position, edge.num_bytes, edge.is_kept)
                    for position, edge in enumerate(held.inputs)
                    if edge.requires_grad
                ),
                spread=frozenset(map(local.params.index, held.spread)),
            )
        return self._blocks[key]

    def _made_again(
        self,
        class_index: int,
        microbatch_size: int,
        held: Program,
        recomputed: tuple[str, ...] | None,
    ) -> frozenset[str]:
        """Return the ops of a rank's program that selective recomputation runs again."""
        again = ops_made_again(self.bound(class_index, microbatch_size), held, recomputed)
        return casts_made_again(held, again)

    def block_bytes(
        self,
        class_index: int,
        microbatch_size: int,
        degrees: Degrees | None = None,
        layouts: tuple[ClassLayout, ...] = (),
        *,
        recompute: Recompute = "none",
        recomputed: tuple[str, ...] | None = None,
        beside: bool = False,
        logit_rows: int = 0,
    ) -> BlockBytes:
        """Return what one block of a class holds while it runs, storage by storage; `recomputed`,
        `beside` and `logit_rows` as in `block`.
        """
        degrees = degrees or Degrees()
        rows = self._logit_rows(class_index, logit_rows)
        # Which ops are named matters to selective recomputation alone.
        key = *self._key(class_index, microbatch_size, degrees, layouts), recompute, beside, rows
        if recompute == "selective":
            key = *key, recomputed
        if key not in self._bytes:
            local = self._on_fullest(
                class_index, microbatch_size, degrees, layouts, logit_rows=rows, held=True
            )
            held = as_saved(local, self.profile)
            again = frozenset[str]()
            if recompute == "selective":
                again = self._made_again(class_index, microbatch_size, held, recomputed)
            self._bytes[key] = block_bytes(
                held,
                device_type=self.profile.cluster.device_type,
                recompute=recompute,
                recomputed=again,
                beside=beside,
                is_compiled=self.compiles and why_eager(held) is None,
                instead=saved_instead(held, self.execution),
            )
        return self._bytes[key]

    def narrow_params(self, class_index: int) -> frozenset[int]:
        """Return the positions of the parameters of a class that lie in 8 bits
        (`Execution.keeps_narrow`).
        """
        if not self.execution.keeps_narrow:
            return frozenset()
        local = self.local(class_index, 1)
        held = as_saved(local, self.profile)
        return frozenset(
            position
            for position, name in enumerate(local.params)
            if held.tensor[name].dtype != local.tensor[name].dtype
        )

    def has_experts(self, class_index: int) -> bool:
        """Whether blocks of a class multiply runs of rows, one an expert."""
        return class_index in self._of_experts

    @cached_property
    def experts_per_token(self) -> int:
        """The experts that a token has in each block; the fewest, where blocks differ."""
        found = (experts_per_token(self.graph.classes[index]) for index in self._of_experts)
        return min(found, default=1)

    @cached_property
    def _of_experts(self) -> frozenset[int]:
        """Classes with experts."""
        classes = enumerate(self.graph.classes)
        return frozenset(index for index, program in classes if grouped_products(program))

    def _logit_rows(self, class_index: int, rows: int) -> int:
        """Return the rows of logits that exist at a time; 0 of a class without a loss, whatever a
        plan says, so that its prices are found again.
        """
        return rows if self.has_loss(class_index) else 0

    def has_loss(self, class_index: int) -> bool:
        """Whether blocks of a class have a cross entropy."""
        return class_index in self._of_losses

    @cached_property
    def _of_losses(self) -> frozenset[int]:
        """Classes with a cross entropy."""
        classes = enumerate(self.graph.classes)
        return frozenset(
            index
            for index, program in classes
            if any(op.target == CROSS_ENTROPY for op in program.ops)
        )

    def _key(
        self,
        class_index: int,
        microbatch_size: int,
        degrees: Degrees,
        layouts: tuple[ClassLayout, ...],
    ) -> tuple:
        """Return all that the program of a rank depends on."""
        sizes = tuple([degrees[axis.name] for axis in lowered_axes()])
        # (A block without experts is the same on any mesh of theirs.)
        if class_index in self._of_experts:
            sizes += tuple([degrees[axis.name] for axis in FOLDED])
        # On an axis of one rank a layout changes nothing, so it must not tell two prices apart.
        used = tuple([layout for layout in layouts if degrees[layout.axis] > 1])
        return class_index, microbatch_size, sizes, used

    def batch_inputs(self, block_index: int) -> frozenset[str]:
        """Return the batch's tensors that a block takes, itself or through preamble values."""
        if block_index not in self._batch_inputs:
            graph = self.graph
            taken = self.links.given[block_index]
            # A value of the preamble stands for the batch's tensors that it is made of.
            made = taken & set(graph.preamble.outputs)
            through = graph.preamble.only(tuple(sorted(made))).inputs if made else ()
            self._batch_inputs[block_index] = (taken - made) | frozenset(through)
        return self._batch_inputs[block_index]

    def side_values(self, microbatch_size: int) -> SideValues:
        """Return the preamble's values for microbatches of a size."""
        if microbatch_size not in self._side_values:
            self._side_values[microbatch_size] = find_side_values(self.graph, microbatch_size)
        return self._side_values[microbatch_size]


def costs_of_groups(profile: Profile, on: Callable[[Profile], CostCache]) -> CostCache:
    """Return the prices `on` a profile; of a cluster of several groups those on each of them."""
    if not profile.groups:
        return on(profile)
    costs = on(profile.groups[0].profile)
    costs.groups = {group.name: on(group.profile) for group in profile.groups}
    costs.group_sizes = {group.name: group.num_devices for group in profile.groups}
    return costs


def _with_tables(times: RunTimes, local: Program, profile: Profile) -> RunTimes:
    """Add what tables with a gradient of rows take."""
    forward_s, backward_s = table_seconds(local, profile)
    if not backward_s:
        return times
    return replace(
        times,
        forward_s=times.forward_s + forward_s,
        backward_s=times.backward_s + backward_s,
        rerun_s=times.rerun_s + forward_s,
    )
