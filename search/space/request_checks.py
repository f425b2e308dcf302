"""Checks of a request against a model and a cluster, before anything is searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import gcd, prod
from typing import cast

from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.language.across.cut.whole_batch import (
    NOTHING_ACROSS,
    Across,
    one_microbatch,
    spell_accept,
    stays_whole,
)
from planner.language.graph import ModelGraph, Unit
from planner.language.graph.called_modules import called_whole
from planner.language.graph.encoder_decoder import first_decoder_block
from planner.language.layout.axes import AXES, Degrees, axis_names, batch_axes, lowered_axes
from planner.language.lowering.defaults import check_balance
from planner.language.ops.families.products.narrow import BLOCK, rate_dtype
from planner.language.plan import Recompute
from planner.language.plan.parts import scaling_named
from planner.language.schedule import find_schedule
from planner.language.stacks import Expressed
from search.request import SearchRequest


def validate_request(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    across: Across = NOTHING_ACROSS,
    expressed: Expressed | None = None,
) -> None:
    """Raise LayoutError for choices that cannot go together, with what to try.

    `across` keeps the batch whole (`planner.language.across.cut.whole_batch`); `expressed` is what
    the stack expresses that plans are for.
    """
    n = request.num_devices
    if expressed is not None:
        check_expressed(request, expressed, cluster)
    if cluster.max_devices is not None and n > cluster.max_devices:
        raise LayoutError(
            f"`num_devices` {n} was given, but profile {cluster.name!r} describes at most "
            f"{cluster.max_devices} devices; use `num_devices` {cluster.max_devices} or fewer, or "
            "another `profile`"
        )
    _check_precision(request, cluster)
    sides = (*axis_names(), "pp")
    fixed = {name: request.fixed(name) for name in sides}
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
        advice = f"use divisors of {n}: {listed(divisors(n))}"
        if all(n % value == 0 for value in given.values()):  # (each is one already)
            advice = "leave one of them out"
            if cluster.max_devices is None or product <= cluster.max_devices:
                advice += f", or use `num_devices` {product}"
        raise LayoutError(
            f"{text} does not divide `num_devices` {n}, and degrees are never changed silently; "
            f"{rule}, so {advice}"
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
                f"`num_devices` {n}; use divisors of {n}: {listed(divisors(n))}"
            )
    blocks = len(graph.blocks)
    if request.balance:
        stages = len(request.balance)
        if request.pp:
            stages = request.pp * (request.vpp or max(1, stages // request.pp))
        check_balance(request.balance, num_blocks=blocks, num_stages=stages)
    if request.split_rank is not None:
        _check_split(request, graph)
    stages = (request.pp or 1) * (request.vpp or 1)
    if stages > blocks:
        raise LayoutError(
            f"pp={request.pp or 1} * vpp={request.vpp or 1} makes {stages} stages, but the model "
            f"has {blocks} blocks and a stage holds at least one; use pp * vpp <= {blocks}"
            f"{called_whole(graph)}"
        )
    cuts = {axis.name: fixed[axis.name] for axis in batch_axes() if fixed[axis.name]}
    parts = prod(size or 1 for size in cuts.values())
    _check_units(request, graph.unit)
    # What is cut are units of samples that belong together; of most models each is one sample.
    unit, units = graph.unit.size, request.global_batch // graph.unit.size
    if units % parts:
        of_units = "" if unit == 1 else f" of {units} {graph.unit.spelled}"
        raise LayoutError(
            f"{' * '.join(f'{name}={size}' for name, size in cuts.items())} does not divide "
            f"`global_batch` {request.global_batch}{of_units}; every replica takes the same number "
            f"of samples, so use {' * '.join(cuts)} in "
            f"{listed(divisors(gcd(units, n)))} or `global_batch` "
            f"{-(-units // parts) * parts * unit}"
        )
    per_part = units // parts
    size = None if request.microbatch_size is None else request.microbatch_size // unit
    if size is not None and per_part % size:
        samples = per_part * unit
        whose = f"the {samples} samples of a replica" if cuts else f"the batch of {samples}"
        raise LayoutError(
            f"`microbatch_size` {size * unit} does not divide {whose}; use a divisor: "
            f"{listed([each * unit for each in _microbatch_sizes(per_part, request.pp or 1)])}"
        )
    if across:
        _check_whole(request, graph, across, cuts={**cuts, "microbatch_size": size})
    most = 1 if across else per_part // (size or 1)
    if request.schedule is not None:
        spec = find_schedule(request.schedule)
        pp = request.pp or min(2, blocks)
        vpp = request.vpp or spec.min_vpp
        if reason := spec.why_not(pp=pp, vpp=vpp, num_microbatches=most):
            if across:
                raise LayoutError(
                    f"{reason} ({one_microbatch(graph, across.of_microbatches)}); use `schedule` "
                    f"naive or no pipeline, or accept it: {spell_accept(across.of_microbatches)}"
                )
            raise LayoutError(
                f"{reason} (the batch gives at most {most} microbatches); use other values, or a "
                "larger `global_batch`"
            )
    elif request.pp is not None and most < request.pp and not across:
        smaller = _microbatch_sizes(per_part, request.pp) if size is not None else []
        ways = [f"`microbatch_size` {max(smaller)}"] if smaller else []
        raise LayoutError(
            f"pp={request.pp} needs at least {request.pp} microbatches, but the batch gives "
            f"at most {most} per replica; use "
            f"{', '.join([f'`global_batch` {parts * (size or 1) * request.pp}', *ways])} or a "
            "smaller `pp`"
        )


def _check_whole(
    request: SearchRequest,
    graph: ModelGraph,
    across: Across,
    *,
    cuts: Mapping[str, int | None],
) -> None:
    """Raise LayoutError where a choice cuts a batch across which the model computes."""
    fixed = {name: request.fixed(name) for name in axis_names()}
    degrees = Degrees(**{name: size for name, size in fixed.items() if size is not None})
    parts, size = degrees.along("batch"), request.microbatch_size
    count = 1 if size is None else request.global_batch // parts // size
    if count > 1 and request.dp is None:
        # Replicas that the search may add take the samples of all microbatches but one.
        parts = request.global_batch // (size or 1)
        if not across.changed(num_microbatches=1, degrees=Degrees(dp=parts)):
            return
    changed = across.changed(num_microbatches=count, degrees=degrees)
    if changed:
        told = stays_whole if count == 1 else one_microbatch
        given = [f"`{name}` {value}" for name, value in cuts.items() if value is not None]
        raise LayoutError(
            f"{' and '.join(given)} {'were' if len(given) > 1 else 'was'} given, which would cut "
            f"the batch of {request.global_batch} samples into {count * degrees.along('batch')} "
            "parts, and "
            f"{told(graph, changed)}; leave that to the search, or accept it: "
            f"{spell_accept(changed)}"
        )


def _check_units(request: SearchRequest, unit: Unit) -> None:
    """Raise LayoutError for sizes by which samples that belong together would be cut apart."""
    allowed = [int(value) for value in request.allowed("microbatch_size")]
    for name, sizes in (
        ("global_batch", [request.global_batch]),
        ("microbatch_size", [request.microbatch_size or unit.size, *allowed]),
    ):
        for size in sizes:
            if why := unit.why_not(size):
                raise LayoutError(f"`{name}` {size} was given; {why}")
    if unit.runs > 1 and request.meshes == "own":
        raise LayoutError(
            f"`meshes` own was given, and samples belong together in {unit.spelled}, which stages "
            "of different meshes can't hand on; use `meshes` same"
        )


def check_expressed(request: SearchRequest, expressed: Expressed, cluster: ClusterSpec) -> None:
    """Raise LayoutError for a choice of a request that the stack of its execution has not."""
    for name, value, why in _not_expressed(request, expressed):
        raise LayoutError(
            f"`{name}` {value} was given, and plans are for `execution` {request.execution}: "
            f"{why}; change `{name}`, or plan for another `execution`"
        )
    n, each = request.num_devices, cluster.devices_per_node
    if n > each and n % each:
        raise LayoutError(
            f"`num_devices` {n} was given, and nodes have {each}; {expressed.stack.title} starts "
            f"as many ranks on each node: use {n // each * each} or {-(-n // each) * each}"
        )


def _not_expressed(
    request: SearchRequest, expressed: Expressed
) -> Iterator[tuple[str, object, str]]:
    """Yield what a request fixes that the stack does not express: its name, its value and why."""
    sizes = {name: request.fixed(name) or 1 for name in (*axis_names(), "pp", "vpp")}
    found: list[tuple[str, object, str]] = [
        (name, size, expressed.why_not_size(name, size)) for name, size in sizes.items()
    ]
    if request.zero is not None:
        beside = [name for name, size in sizes.items() if size > 1]
        if request.recompute not in (None, "none"):
            beside.append("recompute")
        found.append(("zero", request.zero, expressed.why_no_zero(request.zero, beside)))
    schedules = expressed.stack.schedules
    if request.schedule is not None and schedules is not None and request.schedule not in schedules:
        own = f"it has {', '.join(schedules)}" if schedules else "it has no pipeline"
        found.append(("schedule", request.schedule, own))
    if request.recompute is not None:
        choice = cast("Recompute", request.recompute)
        found.append(("recompute", choice, expressed.why_no_recompute(choice)))
    parts = {"both": ("optimizer", "activations"), "auto": (), "none": ()}
    for part in parts.get(request.offload, (request.offload,)):
        found.append(("offload", request.offload, expressed.why_not_on_host(part)))
    if request.meshes == "own":
        found.append(("meshes", "own", f"{expressed.stack.title} has one mesh for all stages"))
    balance = tuple(accumulate(request.balance, initial=0))[:-1]
    if request.balance:
        shown = ",".join(map(str, request.balance))
        found.append(("balance", shown, expressed.why_not_cut(balance)))
    why = expressed.why_no_precision(request.precision)
    found.append(("precision", request.precision, why))
    return ((name, value, why) for name, value, why in found if why)


def _check_precision(request: SearchRequest, cluster: ClusterSpec) -> None:
    scaling = scaling_named(request.precision)
    if scaling and rate_dtype(scaling) not in dict(cluster.peak_flop_per_s):
        which, such_as = "", "h100-sxm5-80gb"
        if scaling == "blocks":
            which, such_as = f" with a scale for {BLOCK} neighbours", "b200-sxm"
        raise LayoutError(
            f"`precision` {request.precision} was given, and profile {cluster.name!r} has no rate "
            f"of products of 8-bit floats{which}, which its plans are priced by; use `precision` "
            f"bf16, or a `profile` of a device that multiplies these, such as {such_as}"
        )


def _check_split(request: SearchRequest, graph: ModelGraph) -> None:
    given = f"`split_rank` {request.split_rank} was given"
    first = first_decoder_block(graph)
    if first is None:
        raise LayoutError(
            f"{given}, but no block of an encoder stands before those of a decoder (blocks: "
            f"{', '.join(block.name for block in graph.blocks[:8])}); leave it out"
        )
    most = min(first, (request.pp or request.num_devices) - 1)
    if most < 1:
        raise LayoutError(
            f"{given}, and ranks before it hold the encoder, others the decoder, which takes a "
            "`pp` of 2 or more; leave it out"
        )
    if not 1 <= (request.split_rank or 0) <= most:
        raise LayoutError(
            f"{given}; ranks before it hold the encoder's {first} blocks, at least one each, and "
            f"others the decoder, so use 1 to {most}"
        )
    if (request.vpp or 1) > 1 or request.meshes == "own" or request.solver == "ilp":
        raise LayoutError(
            f"{given}, which goes with one stage a rank, `meshes` same and `solver` dp or "
            "recursive; use these"
        )


def _microbatch_sizes(samples: int, pp: int) -> list[int]:
    """Return the sizes that cut a replica's samples into as many microbatches as `pp` needs."""
    return [size for size in divisors(samples) if samples // size >= pp]


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, the first 16 of them."""
    shown = [str(n) for n in numbers[:16]]
    return ", ".join(shown) + (", ..." if len(numbers) > 16 else "")


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
