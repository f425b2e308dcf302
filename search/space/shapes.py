"""The space of configurations: every (mesh, pp, vpp, microbatch size, ...) that divides.

A configuration fixes everything but the stage boundaries and the placements inside blocks.
Degrees are any divisors, not only powers of two, and what the user fixed is honoured
exactly (`mesh_sizes` has the meshes). Ranks hold at most `MOST_VPP` stages unless asked otherwise
by `vpp`.

A `Shape` is a set of configurations that differ in schedule, vpp and ZeRO stage alone; they
share most bounds, so a search opens a shape only when it may hold the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.layout.axes import AXES, Degrees, batch_axes, copy_axes, split_axes
from planner.plan import Recompute
from planner.plan.replication import Replication
from planner.schedule import DEFAULT_SCHEDULE, find_schedule, searched_schedules
from search.request import RECOMPUTE_CHOICES, SearchRequest
from search.space.mesh_sizes import MeshSizes, Reasons, divisors
from search.space.request_checks import listed, validate_request

MOST_VPP = 8
SEARCHED_ZERO = (0, 1, 3)


class _OnMesh:
    """Names for sizes of a stage's mesh."""

    __slots__ = ()
    degrees: Degrees

    @property
    def batch_parts(self) -> int:
        """Parts of a microbatch: ranks of all axes that cut the batch, dp among them."""
        return self.degrees.along("batch")

    @property
    def cp(self) -> int:
        """Parts of every sequence."""
        return self.degrees["cp"]

    @property
    def tp(self) -> int:
        """Parts of parameters and heads."""
        return self.degrees["tp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(_OnMesh):
    """One point of the space.

    Attributes:
        degrees: sizes of the mesh of a stage.
        pp: pipeline ranks.
        vpp: stages of each pipeline rank.
        microbatch_size: samples of a microbatch in each part that the batch axes cut.
        num_microbatches: microbatches of a step.
        schedule: name of the pipeline schedule.
        zero: stage of ZeRO.
        recompute: a choice for all stages, ``mixed`` (any by stage), or those that stages choose
            between, joined by ``|``.
        stage_tps: empty where all stages have this mesh, else each stage's tp.
        device_groups: of a cluster of several groups of devices, that of each stage.
        shares: as in `Plan`.
    """

    degrees: Degrees
    pp: int
    vpp: int
    microbatch_size: int
    num_microbatches: int
    schedule: str
    zero: int
    recompute: str
    stage_tps: tuple[int, ...] = ()
    device_groups: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def pipeline(self) -> tuple[str, int, int, int]:
        """What its job table follows from: schedule, pp, vpp and number of microbatches."""
        return self.schedule, self.pp, self.vpp, self.num_microbatches

    @property
    def replication(self) -> Replication:
        """How ranks that hold the same parameters share them."""
        return Replication(
            replicas=self.degrees.along("data"),
            copies=self.degrees.along("copies"),
            zero_stage=self.zero,
        )

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have jobs of their own with something to do: ZeRO's are made
        with the input's, since FSDP2 reduces them when a block's backward ends.
        """
        return find_schedule(self.schedule).splits_backward and not self.replication.is_sharded

    @property
    def label(self) -> str:
        """Short name such as ``dp2 tp4 pp8 mbs1x16 1f1b zero1 recompute-none``."""
        sizes: dict[str, object] = dict(self.degrees)
        if self.stage_tps:
            sizes["tp"] = "/".join(map(str, self.stage_tps))
        always = [axis.name for axis in AXES if axis.in_every_file]
        others = [name for name in sizes if name not in always and self.degrees[name] > 1]
        parts = [f"{name}{sizes[name]}" for name in always]
        parts.append(f"pp{self.pp}")
        if self.device_groups:
            parts[-1] += f"@{'/'.join(self.device_groups)}"
        parts += [f"{name}{sizes[name]}" for name in others]
        if self.vpp > 1:
            parts.append(f"vpp{self.vpp}")
        parts.append(f"mbs{self.microbatch_size}x{self.num_microbatches}")
        if self.pp > 1:
            parts.append(self.schedule)
        return " ".join([*parts, f"zero{self.zero}", f"recompute-{self.recompute}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(_OnMesh):
    """Configurations of equal degrees and microbatches: one for each option and ZeRO stage.

    Attributes:
        degrees: sizes of the mesh of a stage.
        pp: pipeline ranks.
        microbatch_size: samples of a microbatch in each part that the batch axes cut.
        num_microbatches: microbatches of a step.
        options: (schedule, stages of each pipeline rank) to choose from.
        zeros: stages of ZeRO to choose from.
        recompute: as in `Configuration`.
    """

    degrees: Degrees
    pp: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[tuple[str, int], ...]
    zeros: tuple[int, ...]
    recompute: str

    @property
    def num_configurations(self) -> int:
        """How many configurations the shape holds."""
        return len(self.options) * len(self.zeros)

    def configurations(self) -> Iterator[Configuration]:
        """Yield each of them."""
        for schedule, vpp in self.options:
            for zero in self.zeros:
                yield Configuration(
                    degrees=self.degrees, pp=self.pp, vpp=vpp,
                    microbatch_size=self.microbatch_size,
                    num_microbatches=self.num_microbatches,
                    schedule=schedule, zero=zero, recompute=self.recompute,
                )  # fmt: skip


def recompute_choices(recompute: str) -> tuple[Recompute, ...]:
    """Return what each stage may choose between."""
    if recompute == "mixed":
        return RECOMPUTE_CHOICES
    return tuple(cast("Recompute", choice) for choice in recompute.split("|"))


def list_shapes(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    can_split: Callable[[int], bool],
) -> list[Shape]:
    """Return every shape that divides; raise LayoutError when there is none.

    `can_split` says whether any op of the model has a sharded strategy at that size.
    """
    validate_request(request, graph, cluster)
    for axis in split_axes():
        size = request.fixed(axis.name) or 1
        if size > 1 and not can_split(size):
            tried = [d for d in divisors(request.num_devices) if d == 1 or can_split(d)]
            raise LayoutError(
                f"{axis.name}={size} divides no tensor dimension of model {graph.name!r} that an "
                f"op can be split along; use {axis.name} in {listed(tried)}"
            )
    reasons: Reasons = {}
    found = list(_shapes(request, graph, cluster, can_split, reasons))
    if not found:
        why = "; ".join(reasons.values()) or "the fixed choices exclude each other"
        raise LayoutError(
            f"{request.num_devices} devices with a global batch of {request.global_batch} cannot "
            f"be used: {why}; try another `num_devices` or `global_batch`, such as "
            f"`global_batch` {_next_multiple(request.global_batch, request.num_devices)}"
        )
    return found


def _shapes(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    can_split: Callable[[int], bool],
    reasons: Reasons,
) -> Iterator[Shape]:
    options_of: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
    # What remakes least comes first: stages take the first that fits.
    allowed = sorted(request.values("recompute", RECOMPUTE_CHOICES), key=RECOMPUTE_CHOICES.index)
    recompute = "mixed" if allowed == list(RECOMPUTE_CHOICES) else "|".join(allowed)
    if not allowed:
        reasons.setdefault("forbidden", "every kind of recompute is forbidden")
        return
    sizes = MeshSizes(
        request=request, graph=graph, cluster=cluster, can_split=can_split, reasons=reasons
    )
    cuts = " * ".join(axis.name for axis in batch_axes())
    for degrees, pp in sizes.all():
        if pp > len(graph.blocks):
            reasons.setdefault("too few blocks", f"pp={pp} is more than {len(graph.blocks)} blocks")
            continue
        parts = degrees.along("batch")
        if request.global_batch % parts:
            reasons.setdefault(
                f"{cuts} divides the batch",
                f"{cuts}={parts} does not divide the batch {request.global_batch}",
            )
            continue
        per_part = request.global_batch // parts
        for size in request.values("microbatch_size", divisors(per_part)):
            if per_part % size:
                continue
            key = (pp, per_part // size)
            if key not in options_of:
                options_of[key] = tuple(
                    option
                    for option in _schedules(request, graph, *key, reasons)
                    if _may_hold(request, pp, option[1])
                )
            # FSDP2 takes parameters that one axis cuts (`planner.runtime.state.zero`).
            can_shard = sum(degrees[axis.name] > 1 for axis in split_axes()) < 2
            zeros = request.values("zero", SEARCHED_ZERO)
            if degrees.along("shards") == 1 or not can_shard:
                zeros = [zero for zero in zeros if zero == 0 or request.names("zero", zero)]
            # Without ZeRO there are no shards to copy: dp has those meshes.
            copied = [axis.name for axis in copy_axes() if degrees[axis.name] > 1]
            if not all(request.names(name, degrees[name]) for name in copied):
                zeros = [zero for zero in zeros if zero and degrees.along("shards") > 1]
            if options_of[key] and zeros:
                yield Shape(
                    degrees=degrees, pp=pp, microbatch_size=size, num_microbatches=key[1],
                    options=options_of[key], zeros=tuple(zeros), recompute=recompute,
                )  # fmt: skip


def _may_hold(request: SearchRequest, pp: int, vpp: int) -> bool:
    """Whether so many stages take the request's blocks of each stage, or its encoder apart."""
    if request.balance and pp * vpp != len(request.balance):
        return False
    return request.split_rank is None or (vpp == 1 and pp > request.split_rank)


def _schedules(
    request: SearchRequest,
    graph: ModelGraph,
    pp: int,
    num_microbatches: int,
    reasons: Reasons,
) -> Iterator[tuple[str, int]]:
    """Yield (schedule, vpp); one plain pair when there is no pipeline to schedule."""
    if pp == 1 and request.schedule is None and 1 in request.values("vpp", (1,)):
        yield DEFAULT_SCHEDULE, 1
        return
    for name in request.values("schedule", searched_schedules()):
        spec = find_schedule(name)
        most = min(len(graph.blocks) // pp, spec.max_vpp or len(graph.blocks))
        for vpp in request.values("vpp", range(spec.min_vpp, min(most, MOST_VPP) + 1)):
            if not spec.min_vpp <= vpp <= most:
                continue
            reason = spec.why_not(pp=pp, vpp=vpp, num_microbatches=num_microbatches)
            if reason is None:
                yield name, vpp
            elif num_microbatches < pp:
                reasons.setdefault(
                    "too few microbatches",
                    f"pp={pp} needs {pp} microbatches and the batch gives {num_microbatches}",
                )
            else:
                reasons.setdefault("schedule takes the sizes", reason)


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
