"""Nothing fits: the smallest memory that would do, and what it was short of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.units import GIB, format_bytes
from search.bounds.catalogue import TableBounds
from search.branch_and_bound import EvaluatedPlan
from search.candidates import Candidates
from search.partition.chain_dp import smallest_peak
from search.priced_configuration import PricedConfiguration
from search.request import SearchRequest
from search.space.configuration import Configuration, Shape
from search.stages.stage_table import StageTable, TableKey


def explain_infeasible(
    leanest: EvaluatedPlan, request: SearchRequest, memory_limit_bytes: float
) -> tuple[tuple[str, ...], int]:
    """Return the reasons, most useful first, and the smallest limit that would fit in bytes."""
    limit_gib = round_up(leanest.estimate.peak_bytes / GIB)
    reasons = (
        f"{nothing_fits(request, memory_limit_bytes)}: the smallest limit that would fit is "
        f"{limit_gib} GiB ({leanest.configuration.label}); "
        f"try `memory_limit_bytes` {limit_gib} GiB, more devices, or fewer fixed choices",
    )
    return reasons, int(limit_gib * GIB)


def memory_limit(candidates: Candidates, request: SearchRequest) -> float:
    """Return the bytes of a device that a plan may take."""
    return float(request.memory_limit_bytes or candidates.profile.memory_bytes)


def nothing_fits(request: SearchRequest, memory_limit_bytes: float) -> str:
    """Say what nothing fits."""
    return (
        f"nothing fits {format_bytes(memory_limit_bytes)} per device on {request.num_devices} "
        f"devices with a global batch of {request.global_batch}"
    )


def explain_infeasible_groups(
    limits: Mapping[str, float], request: SearchRequest
) -> tuple[str, ...]:
    """Return the reason for which nothing fits the groups of devices of a cluster."""
    have = " and ".join(f"{format_bytes(limit)} on {name}" for name, limit in limits.items())
    return (
        f"nothing fits the {request.num_devices} devices, with {have}, for a global batch of "
        f"{request.global_batch}; try more nodes, or fewer fixed choices",
    )


def round_up(number: float, digits: int = 4) -> float:
    """Return a number of so many significant digits that is no smaller."""
    step = 10.0 ** (math.floor(math.log10(number)) - digits + 1)
    return float(f"{math.ceil(number / step) * step:.{digits}g}")


def find_leanest(candidates: Candidates, shapes: Sequence[Shape]) -> EvaluatedPlan:
    """Return the plan that needs the fewest bytes on its fullest device.

    Best first by the arithmetic bound: a configuration whose bound is no smaller than the
    least found need not be cut. Interleaved stages are left out: they never need less than the
    same pipeline without.
    """
    best: EvaluatedPlan | None = None
    for bound, _, configuration, table in _by_least_bytes(candidates, shapes):
        limit = best.estimate.peak_bytes if best else math.inf
        if bound >= limit:
            break
        done = _leanest_partition(candidates, configuration, table, limit)
        if done and done.estimate.peak_bytes < limit:
            best = done
    assert best is not None, "without a limit every configuration has a cut"
    return best


def find_fitting(
    candidates: Candidates,
    shapes: Sequence[Shape],
    memory_limit_bytes: float,
    *,
    most_tries: int | None = None,
) -> EvaluatedPlan | None:
    """Return a plan that fits, tried as by `find_leanest`; None where there seems to be none."""
    limit = math.nextafter(memory_limit_bytes, math.inf)
    for bound, _, configuration, table in _by_least_bytes(candidates, shapes)[:most_tries]:
        if bound >= limit:
            break
        done = _leanest_partition(candidates, configuration, table, limit)
        if done and done.estimate.peak_bytes < limit:
            return done
    return None


def _leanest_partition(
    candidates: Candidates, configuration: Configuration, table: StageTable, limit: float
) -> EvaluatedPlan | None:
    """Return the plan of the partition of the least bytes; None where its bound is no less than a
    limit, or there is none.
    """
    priced = PricedConfiguration(candidates, configuration, table)
    if configuration.vpp == 1:
        cut = smallest_peak(priced.problem(math.inf))
        if cut is not None and cut.value >= limit:
            return None
    else:
        cut = priced.even_cut(math.inf)
    if cut is None:
        return None
    plan = priced.plan(cut)
    return EvaluatedPlan(configuration=configuration, plan=plan, estimate=candidates.estimate(plan))


def _by_least_bytes(
    candidates: Candidates, shapes: Sequence[Shape]
) -> list[tuple[float, int, Configuration, StageTable]]:
    """Return (bound in bytes, order, configuration, table), the smallest bound first.

    Raises LayoutError where no layout does what is asked.
    """
    least: dict[tuple[int, int], int] = {}
    for shape in shapes:
        key = (shape.tp, shape.cp)
        least[key] = min(shape.microbatch_size, least.get(key, shape.microbatch_size))
    # Activations grow with the microbatch, all else stays.
    small = [shape for shape in shapes if shape.microbatch_size == least[shape.tp, shape.cp]]
    every = [configuration for shape in small for configuration in shape.configurations()]
    plain = [configuration for configuration in every if configuration.vpp == 1] or every
    bounds: dict[TableKey, TableBounds] = {}
    tries = [
        (
            bounds.setdefault(table.key, TableBounds(table=table)).least_peak_bytes(configuration),
            order,
            configuration,
            table,
        )
        for order, configuration in enumerate(plain)
        for table in candidates.tables(
            configuration.tp, configuration.microbatch_size, configuration.cp
        )
    ]
    if not tries:
        assert candidates.layouts.why_no_cp is not None, "only cp can leave no layout"
        raise candidates.layouts.why_no_cp
    return sorted(tries, key=lambda entry: entry[:2])
