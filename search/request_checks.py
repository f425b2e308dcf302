"""Checks of a request against a model and a cluster, before anything is searched."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.layout.sequences import check_hands_on_sequences
from planner.plan.defaults import check_balance
from planner.schedule import find_schedule
from search.request import SearchRequest


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def validate_request(request: SearchRequest, graph: ModelGraph, cluster: ClusterSpec) -> None:
    """Raise LayoutError for choices that cannot go together, with what to try."""
    n = request.num_devices
    if cluster.max_devices is not None and n > cluster.max_devices:
        raise LayoutError(
            f"`num_devices` {n} was given, but profile {cluster.name!r} describes at most "
            f"{cluster.max_devices} devices; use `num_devices` {cluster.max_devices} or fewer, or "
            "another `profile`"
        )
    if request.cp is not None and request.cp > 1:
        check_hands_on_sequences(graph, "cp", request.cp)
    fixed = {name: getattr(request, name) for name in ("dp", "cp", "tp", "pp")}
    given = {name: value for name, value in fixed.items() if value is not None}
    product = 1
    for value in given.values():
        product *= value
    text = " * ".join(f"{name}={value}" for name, value in given.items())
    if n % product:
        raise LayoutError(
            f"{text} does not divide `num_devices` {n}, and degrees are never changed silently; "
            f"dp * cp * tp * pp must equal {n}, so use divisors of {n}: {listed(divisors(n))}"
        )
    if fixed["dp"] and fixed["tp"] and fixed["pp"] and product != n:
        raise LayoutError(
            f"{text} uses {product} of `num_devices` {n}; dp * cp * tp * pp must equal {n}, so "
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
    stages = (request.pp or 1) * (request.vpp or 1)
    if stages > blocks:
        raise LayoutError(
            f"pp={request.pp or 1} * vpp={request.vpp or 1} makes {stages} stages, but the model "
            f"has {blocks} blocks and a stage holds at least one; use pp * vpp <= {blocks}"
        )
    per_dp = request.global_batch
    if request.dp is not None:
        if request.global_batch % request.dp:
            raise LayoutError(
                f"dp={request.dp} does not divide `global_batch` {request.global_batch}; every "
                f"replica takes the same number of samples, so use dp in "
                f"{listed(divisors(request.global_batch))} or another batch"
            )
        per_dp //= request.dp
    size = request.microbatch_size
    if size is not None and per_dp % size:
        whose = f"the {per_dp} samples of a replica" if request.dp else f"the batch of {per_dp}"
        raise LayoutError(
            f"`microbatch_size` {size} does not divide {whose}; use {listed(divisors(per_dp))}"
        )
    if request.schedule is not None:
        spec = find_schedule(request.schedule)
        pp = request.pp or min(2, blocks)
        vpp = request.vpp or spec.min_vpp
        most = per_dp // (size or 1)
        if reason := spec.why_not(pp=pp, vpp=vpp, num_microbatches=most):
            raise LayoutError(f"{reason} (the batch gives at most {most} microbatches)")
    elif request.pp is not None and per_dp // (size or 1) < request.pp:
        raise LayoutError(
            f"pp={request.pp} needs at least {request.pp} microbatches, but the batch gives "
            f"at most {per_dp // (size or 1)} per replica; use a larger `global_batch`, a smaller "
            f"`microbatch_size` or a smaller `pp`"
        )


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, the first 16 of them."""
    shown = [str(n) for n in numbers[:16]]
    return ", ".join(shown) + (", ..." if len(numbers) > 16 else "")
