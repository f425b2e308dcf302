"""The space of configurations: every (mesh, pp, vpp, microbatch size, ...) that divides.

    devices = pp * product of the sizes of all axes

Degrees are any divisors, not only powers of two. What a request fixed or allowed is honoured
exactly; of an axis that it does not name, sizes are tried as the table of axes says
(`Axis.searched`, `Axis.within_node`, `Axis.most`). Axes that blocks are lowered on come first,
innermost first, then those that cut the batch. One axis is not chosen: it gets the ranks that the
others leave (`axes.rest_axis`). Ranks hold at most `MOST_VPP` stages unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.language.across.cut.whole_batch import (
    NOTHING_ACROSS,
    Across,
    one_microbatch,
    spell_accept,
    stays_whole,
)
from planner.language.graph import ModelGraph
from planner.language.layout.axes import (
    Axis,
    Degrees,
    batch_axes,
    check_experts_mesh,
    copy_axes,
    lowered_axes,
    rest_axis,
    split_axes,
)
from planner.language.layout.class_layout import MOST
from planner.language.lowering.experts import check_experts_parts, experts_of
from planner.language.plan.replication import why_no_zero
from planner.language.schedule import find_schedule
from planner.language.schedule.registry import DEFAULT_SCHEDULE, searched_schedules
from planner.language.stacks import Expressed
from search.request import SearchRequest
from search.space.advice import advised, tried_changes
from search.space.configuration import RECOMPUTE_CHOICES, Shape
from search.space.request_checks import divisors, listed, validate_request

MOST_VPP = 8
SEARCHED_ZERO = (0, 1, 3)
UNFILLED = "naive"
"""The schedule of fewer microbatches than pipeline ranks."""
STAYS_WHOLE = "the batch stays whole"
"""The rule of a batch across which the model computes, among the reasons."""

Reasons = dict[str, str]
"""Rules that left out meshes or schedules, each with its first example; grows in place."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The meshes of a request, and the shapes and schedules of each.

    Attributes:
        request: what is fixed, allowed and forbidden.
        graph: the model, which some axes can't divide.
        cluster: whose nodes some axes stay in.
        can_split: whether any op of the model can be split in so many pieces.
        across: what keeps the batch whole (`planner.language.across.cut.whole_batch`).
        expressed: what the stack that plans are for expresses; None: everything.
        on_host: what plans have in the host's memory, as features of plans.
        reasons: what was left out, and why.
    """

    request: SearchRequest
    graph: ModelGraph
    cluster: ClusterSpec
    can_split: Callable[[int], bool]
    across: Across = NOTHING_ACROSS
    expressed: Expressed | None = None
    on_host: tuple[str, ...] = ()
    reasons: Reasons = field(default_factory=dict)

    def meshes(self) -> Iterator[tuple[Degrees, int]]:
        """Yield (sizes of the axes, pipeline ranks)."""
        rest = rest_axis()
        chosen = [axis for axis in (*lowered_axes(), *reversed(batch_axes())) if axis is not rest]
        for sizes in self._of(chosen, {}):
            if not self._has_two_levels(sizes):
                continue
            left = self.request.num_devices // prod(sizes.values())
            for pp in self.request.values("pp", divisors(left)):
                # The axis that is not chosen gets the ranks that are left.
                others = left // pp
                fits = left % pp == 0 and others in self.request.values(rest.name, (others,))
                if fits:
                    for degrees in self._with_experts(Degrees(**sizes, **{rest.name: others})):
                        yield degrees, pp

    def _with_experts(self, mesh: Degrees) -> Iterator[Degrees]:
        """Yield a stage's mesh with sizes of the experts'. Of an expert's matrices ranks of tp each
        have a part, or all of them: as the layout on tp says, so each is tried.
        """
        for ep in self._searched_ep:
            for etp in (1,) if ep == 1 else sorted({1, mesh["tp"]}):
                degrees = mesh if ep == 1 else mesh.with_sizes(ep=ep, etp=etp)
                try:
                    check_experts_mesh(degrees)
                except LayoutError as error:
                    self.reasons.setdefault("ep divides the ranks", str(error))
                    continue
                if self._expresses("ep", ep) and self._expresses("etp", etp):
                    yield degrees

    @cached_property
    def _searched_ep(self) -> list[int]:
        """Return the sizes of ep to try."""
        # (Stages with meshes of their own share no mesh of experts.)
        number = experts_of(self.graph) if self.request.meshes == "same" else 1
        found = []
        for ep in self.request.values("ep", divisors(number)):
            try:
                check_experts_parts(self.graph, ep)
            except LayoutError as error:
                self.reasons.setdefault("ep divides experts", str(error))
                continue
            found.append(ep)
        return found

    def _of(self, axes: list[Axis], before: dict[str, int]) -> Iterator[dict[str, int]]:
        """Yield the sizes of `axes` in all ways, with those chosen `before` them."""
        if not axes:
            yield before
            return
        axis, *others = axes
        left = self.request.num_devices // prod(before.values())
        for size in self.request.values(axis.name, self._searched(axis)):
            if left % size == 0 and (size == 1 or self._can_have(axis, size)):
                yield from self._of(others, {**before, axis.name: size})

    def _has_two_levels(self, sizes: dict[str, int]) -> bool:
        """Whether sequences that are cut by heads along an axis, inside nodes, are cut along
        another between nodes, too, and into no more parts than a search tries; what the request
        names is honoured.
        """
        cuts = [axis for axis in lowered_axes() if axis.cuts_sequences]
        parts = prod(sizes[axis.name] for axis in cuts)
        inside = 1
        for axis in lowered_axes():
            size = sizes[axis.name]
            inside *= size
            if not axis.by_heads or size == 1 or self.request.names(axis.name, size):
                continue
            most = parts if axis.most is None else axis.most(self.graph)
            per_node = self.cluster.devices_per_node
            # (Alone it is what the other axis does.)
            if not inside <= per_node < inside * parts // size or parts > most:
                return False
        return True

    def _searched(self, axis: Axis) -> list[int]:
        """Return the sizes to try of an axis that the request does not name."""
        spans_nodes = self.request.num_devices > self.cluster.devices_per_node
        if not axis.searched or (axis.between_nodes and not spans_nodes):
            return [1]
        most = self.request.num_devices if axis.most is None else axis.most(self.graph)
        return [n for n in divisors(self.request.num_devices) if n == 1 or n <= most]

    def _can_have(self, axis: Axis, size: int) -> bool:
        """Whether the axis can have a size; if not, why is recorded."""
        given = f"{axis.name}={size}"
        # What the request names is honoured, though a search would not try it by itself.
        if not self.request.names(axis.name, size):
            if axis.within_node and size > self.cluster.devices_per_node:
                self.reasons.setdefault(
                    f"{axis.name} stays in a node",
                    f"{given} spans nodes, which only a fixed `{axis.name}` may",
                )
                return False
            if not axis.whole_params and not self.can_split(size):
                self.reasons.setdefault(
                    f"{axis.name} splits an op", f"{given} divides no dimension of the model"
                )
                return False
        try:
            axis.check(self.graph, axis.name, size)
        except LayoutError as error:
            self.reasons.setdefault(f"{axis.name} divides {axis.divides}", str(error))
            return False
        return self._expresses(axis.name, size)

    def _expresses(self, name: str, size: int) -> bool:
        """Whether the stack has such a size of an axis, or of pp; if not, why is recorded."""
        why = self.expressed.why_not_size(name, size) if self.expressed is not None else ""
        if why:
            self.reasons.setdefault(f"{name} of the stack", f"{name}={size}: {why}")
        return not why

    def has_shapes(self) -> bool:
        """Whether any shape divides."""
        return next(self.shapes(), None) is not None

    def shapes(self) -> Iterator[Shape]:
        """Yield every shape that divides."""
        request, graph, reasons = self.request, self.graph, self.reasons
        options_of: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
        recomputes = self._recomputes()
        cuts = " * ".join(axis.name for axis in batch_axes())
        tables = [meta.fqn for meta in graph.params if meta.table]
        # Sizes of the graph, and so of shapes, count the samples that belong together as one.
        unit, units = graph.unit, request.global_batch // graph.unit.size
        for degrees, pp in self.meshes():
            if tables and degrees.along("data") > degrees.along("batch"):
                reasons.setdefault(
                    "rows of tables and the batch",
                    f"{tables[0]} has a gradient of rows, of whole samples; leave out `cp`",
                )
                continue
            if pp > len(graph.blocks):
                reasons.setdefault(
                    "too few blocks", f"pp={pp} is more than {len(graph.blocks)} blocks"
                )
                continue
            of_rest = rest_axis().name, degrees[rest_axis().name]
            if not all(self._expresses(*size) for size in (("pp", pp), of_rest)):
                continue
            parts = degrees.along("batch")
            if units % parts:
                of_units = "" if unit.is_sample else f" of {units} {unit.spelled}"
                reasons.setdefault(
                    f"{cuts} divides the batch",
                    f"{cuts}={parts} does not divide the batch {request.global_batch}{of_units}",
                )
                continue
            per_part = units // parts
            # A plan counts neither samples of a microbatch nor forwards beyond MOST.
            can_be = (
                size * unit.size
                for size in divisors(per_part)
                if max(size * unit.size, per_part // size * pp) <= MOST
            )
            for samples in request.values("microbatch_size", can_be):
                size, rest = divmod(samples, unit.size)
                if rest or per_part % size or self._changes(per_part // size, degrees):
                    continue
                # Schedules depend on ranks and microbatches alone: each pair is looked up once.
                key = (pp, per_part // size)
                if key not in options_of:
                    options_of[key] = tuple(
                        option for option in self._schedules(*key) if self._may_hold(pp, option[1])
                    )
                for recompute in recomputes:
                    zeros = self._zeros(degrees, pp, recompute)
                    if options_of[key] and zeros:
                        yield Shape(
                            degrees=degrees, pp=pp, microbatch_size=size, num_microbatches=key[1],
                            options=options_of[key], zeros=zeros, recompute=recompute,
                            unit=unit.size,
                        )  # fmt: skip

    def _recomputes(self) -> list[str]:
        """Return what stages may recompute (`Configuration.recompute`), the least first: together
        where each stage has its own, one by one where a stack recomputes the same of all.
        """
        # What recomputes least comes first: stages take the first that fits.
        allowed = sorted(
            self.request.values("recompute", RECOMPUTE_CHOICES), key=RECOMPUTE_CHOICES.index
        )
        if not allowed:
            self.reasons.setdefault("forbidden", "every kind of recompute is forbidden")
            return []
        if self.expressed is not None:
            found = [choice for choice in allowed if not self.expressed.why_no_recompute(choice)]
            if not found:
                why = self.expressed.why_no_recompute(allowed[0])
                self.reasons.setdefault("recompute of the stack", why)
            return [*found]
        return ["mixed" if allowed == list(RECOMPUTE_CHOICES) else "|".join(allowed)]

    @property
    def _searched_zeros(self) -> tuple[int, ...]:
        """Return the stages of ZeRO to try where the request names none: 2 where there is no 1."""
        if self.expressed is None or 1 in self.expressed.stack.zero_stages:
            return SEARCHED_ZERO
        return self.expressed.stack.zero_stages

    @cached_property
    def _no_zero(self) -> str:
        return why_no_zero(self.graph, self.request.precision)

    def _zeros(self, degrees: Degrees, pp: int, recompute: str) -> tuple[int, ...]:
        """Return the stages of ZeRO to try on a mesh."""
        request, shards = self.request, degrees.along("shards")
        zeros = request.values("zero", self._searched_zeros)
        if self._no_zero and shards > 1 and any(zeros):
            self.reasons.setdefault("zero takes one real dtype a block", self._no_zero)
            zeros = [zero for zero in zeros if zero == 0]
        zeros = self._zeros_of_stack(zeros, degrees, pp, recompute)
        # FSDP2 takes parameters that one axis cuts (`planner.runtime.state.zero`).
        can_shard = sum(degrees[axis.name] > 1 for axis in split_axes()) < 2
        if shards == 1 or not can_shard:
            # Of a single shard all stages are the same: the first that a stack has beside the rest.
            first = 0 if self.expressed is None or not can_shard else min(zeros, default=0)
            zeros = [zero for zero in zeros if zero == first or request.names("zero", zero)]
        # Without ZeRO there are no shards to copy: dp has those meshes.
        copied = [axis.name for axis in copy_axes() if degrees[axis.name] > 1]
        if not all(request.names(name, degrees[name]) for name in copied):
            zeros = [zero for zero in zeros if zero and shards > 1]
        return tuple(zeros)

    def _zeros_of_stack(
        self, zeros: list[int], degrees: Degrees, pp: int, recompute: str
    ) -> list[int]:
        """Return the stages of ZeRO that the stack has beside all else."""
        if self.expressed is None:
            return zeros
        sizes = {**degrees, "pp": pp, "recompute": 1 + (recompute != "none")}
        beside = (*self.on_host, *(name for name, size in sizes.items() if size > 1))
        found = {zero: self.expressed.why_no_zero(zero, beside) for zero in zeros}
        for zero, why in found.items():
            if why:
                self.reasons.setdefault("zero of the stack", f"zero={zero}: {why}")
        return [zero for zero, why in found.items() if not why]

    def _changes(self, num_microbatches: int, degrees: Degrees) -> bool:
        """Whether so many microbatches on a mesh change what is computed across samples."""
        if self.expressed is not None and (
            why := self.expressed.why_not_parts(degrees, num_microbatches)
        ):
            self.reasons.setdefault("the batch of the stack", why)
            return True
        changed = self.across.changed(num_microbatches=num_microbatches, degrees=degrees)
        if changed:
            told = stays_whole if num_microbatches == 1 else one_microbatch
            self.reasons.setdefault(
                STAYS_WHOLE,
                f"{told(self.graph, changed)}, unless you accept it: {spell_accept(changed)}",
            )
        return bool(changed)

    def _may_hold(self, pp: int, vpp: int) -> bool:
        """Whether so many stages take the request's blocks of each stage, or its encoder apart."""
        request = self.request
        if request.balance and pp * vpp != len(request.balance):
            return False
        return request.split_rank is None or (vpp == 1 and pp > request.split_rank)

    def _schedules(self, pp: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
        """Yield (schedule, vpp); one plain pair when there is no pipeline to schedule."""
        request, num_blocks = self.request, len(self.graph.blocks)
        if pp == 1 and request.schedule is None and 1 in request.values("vpp", (1,)):
            yield DEFAULT_SCHEDULE, 1
            return
        # A batch that stays whole leaves no microbatches to fill a pipeline with.
        unfilled = (UNFILLED,) if self.across and num_microbatches < pp else ()
        for name in request.values("schedule", (*searched_schedules(), *unfilled)):
            spec = find_schedule(name)
            # A stage holds a block at least.
            most = min(num_blocks // pp, spec.max_vpp or num_blocks)
            for vpp in request.values("vpp", range(spec.min_vpp, min(most, MOST_VPP) + 1)):
                if not spec.min_vpp <= vpp <= most:
                    continue
                sizes = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
                reason = spec.why_not(**sizes)
                if reason is None and self.expressed is not None:
                    reason = self.expressed.why_no_schedule(name, **sizes) or None
                if reason is None:
                    yield name, vpp
                elif num_microbatches < pp:
                    self.reasons.setdefault(
                        "too few microbatches",
                        f"pp={pp} needs {pp} microbatches and the batch gives {num_microbatches}",
                    )
                else:
                    self.reasons.setdefault("schedule takes the sizes", reason)


def space_of(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    can_split: Callable[[int], bool],
    across: Across = NOTHING_ACROSS,
    expressed: Expressed | None = None,
    on_host: tuple[str, ...] = (),
) -> Space:
    """Return the space of a request, with fields as `Space` has them; raise LayoutError for choices
    that cannot go together.
    """
    validate_request(request, graph, cluster, across=across, expressed=expressed)
    for axis in split_axes():
        size = request.fixed(axis.name) or 1
        if size > 1 and not can_split(size):
            tried = [d for d in divisors(request.num_devices) if d == 1 or can_split(d)]
            raise LayoutError(
                f"{axis.name}={size} divides no tensor dimension of model {graph.name!r} that an "
                f"op can be split along; use {axis.name} in {listed(tried)}"
            )
    return Space(
        request=request, graph=graph, cluster=cluster, can_split=can_split, across=across,
        expressed=expressed, on_host=on_host,
    )  # fmt: skip


def list_shapes(space: Space, space_of_changed: Callable[[SearchRequest], Space]) -> list[Shape]:
    """Return every shape that divides; raise LayoutError, with what to try, when there is none.

    `space_of_changed` returns the space of another request, or raises what is wrong with it.
    """
    if found := list(space.shapes()):
        return found

    def has_shapes(changed: SearchRequest) -> bool:
        return space_of_changed(changed).has_shapes()

    request = space.request
    why = "; ".join(space.reasons.values()) or "the fixed choices exclude each other"
    if STAYS_WHOLE in space.reasons:
        remedy = "or use fewer devices (`num_devices`)"
    else:
        remedy = advised(tried_changes(request, has_shapes))
    raise LayoutError(
        f"{request.num_devices} devices with a global batch of {request.global_batch} cannot "
        f"be used: {why}; {remedy}"
    )
