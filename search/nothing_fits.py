"""Nothing fits: the smallest memory that would do, and what it was short of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.units import GIB, format_bytes
from search.candidates import Candidates
from search.chain_dp import smallest_peak
from search.request import SearchRequest
from search.space import Configuration
from search.stage_table import StageTable


def explain_nothing_fits(
    candidates: Candidates,
    configurations: Sequence[Configuration],
    request: SearchRequest,
    memory_limit_bytes: float,
) -> tuple[tuple[str, ...], int]:
    """Return the reasons, most useful first, and the smallest limit that would fit in bytes."""
    least, configuration = smallest_memory(candidates, configurations)
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


def smallest_memory(
    candidates: Candidates, configurations: Sequence[Configuration]
) -> tuple[float, Configuration]:
    """Return the fewest bytes per device of any configuration, and which one.

    Best first by the arithmetic bound: a configuration whose bound is no smaller than the
    least found need not be cut. Virtual stages are left out: they never need less than the
    same pipeline without.
    """
    plain = [c for c in configurations if c.vpp == 1] or list(configurations)
    tries: list[tuple[float, int, Configuration, StageTable]] = []
    smallest_size = {
        tp: min(c.microbatch_size for c in plain if c.tp == tp) for tp in {c.tp for c in plain}
    }
    for order, configuration in enumerate(plain):
        # Activations grow with the microbatch, all else stays.
        if configuration.microbatch_size > smallest_size[configuration.tp]:
            continue
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
        cut = smallest_peak(candidates.problem(configuration, table, math.inf))
        if cut is None:
            continue
        peak = candidates.estimate(candidates.plan(configuration, table, cut)).peak_bytes
        if peak < best:
            best, winner = float(peak), configuration
    return best, winner
