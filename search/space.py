"""The space of configurations: every (mesh, pp, vpp, microbatch size, ...) that divides.

A configuration fixes everything but the stage boundaries and the placements inside blocks.
Degrees are any divisors, not only powers of two, and what the user fixed is honoured
exactly (`mesh_sizes` has the meshes). Ranks hold at most `MOST_VPP` stages unless asked otherwise
by `vpp`.

A `Shape` is a set of configurations that differ in schedule, vpp and ZeRO stage alone; they
share most bounds, so a search opens a shape only when it may hold the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from costmodel.topology import check_priced
from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.layout.axes import AXES, Degrees, axis_names, batch_axes, lowered_axes, split_axes
from planner.plan import Recompute
from planner.plan.defaults import check_balance
from planner.schedule import DEFAULT_SCHEDULE, find_schedule, searched_schedules
from search.mesh_sizes import MeshSizes, Refusals, divisors
from search.request import RECOMPUTE_CHOICES, SearchRequest

MOST_VPP = 8
SEARCHED_ZERO = (0, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
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

    @property
    def dp(self) -> int:
        """Parts of a microbatch: over all axes that cut the batch."""
        return self.degrees.along("batch")

    @property
    def cp(self) -> int:
        """Parts of every sequence."""
        return self.degrees["cp"]

    @property
    def tp(self) -> int:
        """Parts of parameters and heads."""
        return self.degrees["tp"]

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO has replicas to shard over."""
        return self.zero > 0 and self.degrees.along("data") > 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have jobs of their own with something to do: ZeRO's are made
        with the input's, since FSDP2 reduces them when a block's backward ends.
        """
        return find_schedule(self.schedule).splits_backward and not self.is_sharded

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
        parts += [f"{name}{sizes[name]}" for name in others]
        if self.vpp > 1:
            parts.append(f"vpp{self.vpp}")
        parts.append(f"mbs{self.microbatch_size}x{self.num_microbatches}")
        if self.pp > 1:
            parts.append(self.schedule)
        return " ".join([*parts, f"zero{self.zero}", f"recompute-{self.recompute}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
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
    def dp(self) -> int:
        """Parts of a microbatch: over all axes that cut the batch."""
        return self.degrees.along("batch")

    @property
    def cp(self) -> int:
        """Parts of every sequence."""
        return self.degrees["cp"]

    @property
    def tp(self) -> int:
        """Parts of parameters and heads."""
        return self.degrees["tp"]

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


def validate_request(request: SearchRequest, graph: ModelGraph, cluster: ClusterSpec) -> None:
    """Raise LayoutError for choices that cannot go together, with what to try."""
    n = request.num_devices
    if cluster.max_devices is not None and n > cluster.max_devices:
        raise LayoutError(
            f"`num_devices` {n} was given, but profile {cluster.name!r} describes at most "
            f"{cluster.max_devices} devices; use `num_devices` {cluster.max_devices} or fewer, or "
            "another `profile`"
        )
    sides = (*axis_names(), "pp")
    fixed = {name: request.fixed(name) for name in sides}
    check_priced(Degrees(**{name: fixed[name] or 1 for name in axis_names()}))
    for axis in lowered_axes():
        if (fixed[axis.name] or 1) > 1:
            axis.check(graph, axis.name, fixed[axis.name] or 1)
    given = {name: value for name, value in fixed.items() if value is not None}
    product = 1
    for value in given.values():
        product *= value
    text = " * ".join(f"{name}={value}" for name, value in given.items())
    rule = f"{' * '.join(sides)} must equal {n}"
    if n % product:
        raise LayoutError(
            f"{text} does not divide `num_devices` {n}, and degrees are never changed silently; "
            f"{rule}, so use divisors of {n}: {_listed(divisors(n))}"
        )
    if fixed["pp"] and all(fixed[a.name] for a in AXES if a.in_every_file) and product != n:
        raise LayoutError(
            f"{text} uses {product} of `num_devices` {n}; {rule}, so "
            f"leave one of them out or use `num_devices` {product}"
        )
    for name in fixed:
        values = request.allowed(name)
        if values and all(n % int(value) for value in values):
            raise LayoutError(
                f"`allow` {name}={','.join(values)} was given, and none of these divides "
                f"`num_devices` {n}; use divisors of {n}: {_listed(divisors(n))}"
            )
    blocks = len(graph.blocks)
    if request.balance:
        stages = len(request.balance)
        if request.pp:
            stages = request.pp * (request.vpp or max(1, stages // request.pp))
        check_balance(request.balance, num_blocks=blocks, num_stages=stages)
    stages = (request.pp or 1) * (request.vpp or 1)
    if stages > blocks:
        raise LayoutError(
            f"pp={request.pp or 1} * vpp={request.vpp or 1} makes {stages} stages, but the model "
            f"has {blocks} blocks and a stage holds at least one; use pp * vpp <= {blocks}"
        )
    cuts = {axis.name: fixed[axis.name] for axis in batch_axes() if fixed[axis.name]}
    parts = prod(size or 1 for size in cuts.values())
    if request.global_batch % parts:
        raise LayoutError(
            f"{' * '.join(f'{name}={size}' for name, size in cuts.items())} does not divide "
            f"`global_batch` {request.global_batch}; every replica takes the same number of "
            f"samples, so use {' * '.join(cuts)} in {_listed(divisors(request.global_batch))} or "
            "another batch"
        )
    per_part = request.global_batch // parts
    size = request.microbatch_size
    if size is not None and per_part % size:
        whose = f"the {per_part} samples of a replica" if cuts else f"the batch of {per_part}"
        raise LayoutError(
            f"`microbatch_size` {size} does not divide {whose}; use {_listed(divisors(per_part))}"
        )
    if request.schedule is not None:
        spec = find_schedule(request.schedule)
        pp = request.pp or min(2, blocks)
        vpp = request.vpp or spec.min_vpp
        most = per_part // (size or 1)
        if reason := spec.why_not(pp=pp, vpp=vpp, num_microbatches=most):
            raise LayoutError(f"{reason} (the batch gives at most {most} microbatches)")
    elif request.pp is not None and per_part // (size or 1) < request.pp:
        raise LayoutError(
            f"pp={request.pp} needs at least {request.pp} microbatches, but the batch gives "
            f"at most {per_part // (size or 1)} per replica; use a larger `global_batch`, a "
            "smaller `microbatch_size` or a smaller `pp`"
        )


def list_shapes(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    can_split: Callable[[int], bool],
    refusals: Refusals | None = None,
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
                f"op can be split along; use {axis.name} in {_listed(tried)}"
            )
    refusals = refusals if refusals is not None else Refusals()
    found = list(_shapes(request, graph, cluster, can_split, refusals))
    if not found:
        why = "; ".join(refusals.example.values()) or "the fixed choices exclude each other"
        raise LayoutError(
            f"{request.num_devices} devices with a global batch of {request.global_batch} cannot "
            f"be used: {why}; try another `num_devices` or `global_batch`, such as "
            f"`global_batch` {_next_multiple(request.global_batch, request.num_devices)}"
        )
    return found


def list_configurations(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    can_split: Callable[[int], bool],
) -> list[Configuration]:
    """Return every configuration that divides, shape by shape; errors as `list_shapes`."""
    shapes = list_shapes(request, graph, cluster, can_split=can_split)
    return [one for shape in shapes for one in shape.configurations()]


def _shapes(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    can_split: Callable[[int], bool],
    refusals: Refusals,
) -> Iterator[Shape]:
    options_of: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
    # What remakes least comes first: stages take the first that fits.
    allowed = sorted(request.values("recompute", RECOMPUTE_CHOICES), key=RECOMPUTE_CHOICES.index)
    recompute = "mixed" if allowed == list(RECOMPUTE_CHOICES) else "|".join(allowed)
    if not allowed:
        refusals.add("forbidden", "every kind of recompute is forbidden")
        return
    sizes = MeshSizes(
        request=request, graph=graph, cluster=cluster, can_split=can_split, refusals=refusals
    )
    cuts = " * ".join(axis.name for axis in batch_axes())
    for degrees, pp in sizes.all():
        if pp > len(graph.blocks):
            refusals.add("too few blocks", f"pp={pp} is more than {len(graph.blocks)} blocks")
            continue
        parts = degrees.along("batch")
        if request.global_batch % parts:
            refusals.add(
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
                    for option in _schedules(request, graph, *key, refusals)
                    if not (request.balance and pp * option[1] != len(request.balance))
                )
            zeros = tuple(
                request.values("zero", SEARCHED_ZERO if degrees.along("data") > 1 else (0,))
            )
            if options_of[key] and zeros:
                yield Shape(
                    degrees=degrees, pp=pp, microbatch_size=size, num_microbatches=key[1],
                    options=options_of[key], zeros=zeros, recompute=recompute,
                )  # fmt: skip


def _schedules(
    request: SearchRequest,
    graph: ModelGraph,
    pp: int,
    num_microbatches: int,
    refusals: Refusals,
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
                refusals.add(
                    "too few microbatches",
                    f"pp={pp} needs {pp} microbatches and the batch gives {num_microbatches}",
                )
            else:
                refusals.add("schedule takes the sizes", reason)


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(n) for n in numbers[:16]]
    return ", ".join(shown) + (", ..." if len(numbers) > 16 else "")


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
