"""Nothing fits: the smallest memory that would do, and what it was short of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.units import GIB, format_bytes
from search.candidates import Candidates
from search.chain_dp import smallest_peak
from search.request import SearchRequest
from search.space import Configuration, Shape
from search.stage_table import StageTable


def explain_nothing_fits(
    candidates: Candidates,
    shapes: Sequence[Shape],
    request: SearchRequest,
    memory_limit_bytes: float,
) -> tuple[tuple[str, ...], int]:
    """Return the reasons, most useful first, and the smallest limit that would fit in bytes."""
    least, configuration = smallest_memory(candidates, shapes)
    limit_gib = round_up(least / GIB)
    reasons = (
        f"nothing fits {format_bytes(memory_limit_bytes)} per device on {request.num_devices} "
        f"devices with a global batch of {request.global_batch}: the smallest limit that would "
        f"fit is {limit_gib} GiB ({configuration.label}); "
        f"try --memory-limit {limit_gib}, more devices, or fewer fixed choices",
    )
    return reasons, int(limit_gib * GIB)


def round_up(number: float, digits: int = 4) -> float:
    """Return a number of so many significant digits that is no smaller."""
    step = 10.0 ** (math.floor(math.log10(number)) - digits + 1)
    return float(f"{math.ceil(number / step) * step:.{digits}g}")


def smallest_memory(candidates: Candidates, shapes: Sequence[Shape]) -> tuple[float, Configuration]:
    """Return the fewest bytes per device of any configuration, and which one.

    Best first by the arithmetic bound: a configuration whose bound is no smaller than the
    least found need not be cut. Virtual stages are left out: they never need less than the
    same pipeline without.
    """
    least = {
        tp: min(shape.microbatch_size for shape in shapes if shape.tp == tp)
        for tp in {shape.tp for shape in shapes}
    }
    # Activations grow with the microbatch, all else stays.
    small = [shape for shape in shapes if shape.microbatch_size == least[shape.tp]]
    every = [one for shape in small for one in shape.configurations()]
    plain = [one for one in every if one.vpp == 1] or every
    tries: list[tuple[float, int, Configuration, StageTable]] = []
    for order, configuration in enumerate(plain):
        for table in candidates.tables(configuration.tp, configuration.microbatch_size):
            tries.append(
                (
                    candidates.bounds(table).least_peak_bytes(configuration),
                    order,
                    configuration,
                    table,
                )
            )
    tries.sort(key=lambda one: one[:2])
    best, winner = math.inf, tries[0][2]
    for bound, _, configuration, table in tries:
        if bound >= best:
            break
        cut = (
            smallest_peak(candidates.problem(configuration, table, math.inf))
            if configuration.vpp == 1
            else candidates.even_cut(configuration, table, math.inf)
        )
        if cut is None:
            continue
        peak = candidates.estimate(candidates.plan(configuration, table, cut)).peak_bytes
        if peak < best:
            best, winner = float(peak), configuration
    return best, winner
