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
        f"nothing fits {format_bytes(memory_limit_bytes)} per device on {request.num_devices} "
        f"devices with a global batch of {request.global_batch}: the smallest limit that would "
        f"fit is {limit_gib} GiB ({leanest.configuration.label}); "
        f"try `memory_limit_bytes` {limit_gib} GiB, more devices, or fewer fixed choices",
    )
    return reasons, int(limit_gib * GIB)


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


def find_leanest(
    candidates: Candidates, shapes: Sequence[Shape], *, enough_bytes: float = 0.0
) -> EvaluatedPlan:
    """Return the plan that needs the fewest bytes on its fullest device.

    Best first by the arithmetic bound: a configuration whose bound is no smaller than the
    least found need not be cut. Interleaved stages are left out: they never need less than the
    same pipeline without. Ends early at one that needs no more than `enough_bytes`.
    """
    tries = _by_least_bytes(candidates, shapes)
    best: EvaluatedPlan | None = None
    for bound, _, configuration, table in tries:
        if best is not None and bound >= best.estimate.peak_bytes:
            break
        priced = PricedConfiguration(candidates, configuration, table)
        cut = (
            smallest_peak(priced.problem(math.inf))
            if configuration.vpp == 1
            else priced.even_cut(math.inf)
        )
        if cut is None:
            continue
        plan = priced.plan(cut)
        answer = candidates.estimate(plan)
        if best is None or answer.peak_bytes < best.estimate.peak_bytes:
            best = EvaluatedPlan(configuration=configuration, plan=plan, estimate=answer)
        if best.estimate.peak_bytes <= enough_bytes:
            break
    assert best is not None, "without a limit every configuration has a cut"
    return best


def can_fit(candidates: Candidates, shapes: Sequence[Shape], memory_limit_bytes: float) -> bool:
    """Whether any configuration fits; most that do not are told by arithmetic alone."""
    if _by_least_bytes(candidates, shapes)[0][0] > memory_limit_bytes:
        return False
    leanest = find_leanest(candidates, shapes, enough_bytes=memory_limit_bytes)
    return leanest.estimate.peak_bytes <= memory_limit_bytes


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
