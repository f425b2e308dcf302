"""Nothing fits: the smallest memory that would do, and what it was short of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from costmodel.execution import find_execution
from costmodel.uncertainty import needed_limit_bytes
from planner.units import GIB, format_bytes
from profiles import Profile
from search.branch_and_bound import EvaluatedPlan
from search.candidates import Candidates
from search.request import LEAST_ODDS, SearchRequest
from search.space.advice import fixed_choices


def explain_infeasible(
    leanest: EvaluatedPlan, request: SearchRequest, profile: Profile, memory_limit_bytes: float
) -> tuple[tuple[str, ...], int]:
    """Return the reasons, most useful first, and the smallest limit that would fit in bytes."""
    # With the odds that a limit has which is given.
    asked = replace(request, memory_limit_bytes=leanest.estimate.peak_bytes)
    needed = needed_limit_bytes(
        leanest.estimate.peak_bytes, profile, find_execution(request.execution), asked.odds
    )
    limit_gib = round_up(needed / GIB)
    reasons = (
        f"{nothing_fits(request, memory_limit_bytes)}: the smallest limit that would fit is "
        f"{limit_gib} GiB ({leanest.configuration.label}); "
        f"try `memory_limit_bytes` {limit_gib} GiB{or_less_fixed(request, 'more devices')}",
    )
    return reasons, int(limit_gib * GIB)


def memory_limit(candidates: Candidates, request: SearchRequest) -> float:
    """Return the bytes of a device that a plan may take."""
    return request.limit_bytes(candidates.profile)


def nothing_fits(request: SearchRequest, memory_limit_bytes: float) -> str:
    """Say what nothing fits."""
    sure = f" (to fit in {spell_odds(request.odds)})" if request.odds > LEAST_ODDS else ""
    return (
        f"nothing fits {format_bytes(memory_limit_bytes)} per device{sure} on "
        f"{request.num_devices} devices with a global batch of {request.global_batch}"
    )


def spell_odds(odds: float) -> str:
    """Return odds in words: 9 of 10, 99 of 100."""
    for of in (10, 100):
        if abs(odds * of - round(odds * of)) < 1e-9:
            return f"{round(odds * of)} of {of}"
    return f"{100 * odds:.1f} of 100"


def explain_infeasible_groups(
    limits: Mapping[str, float], request: SearchRequest
) -> tuple[str, ...]:
    """Return the reason for which nothing fits the groups of devices of a cluster."""
    have = " and ".join(f"{format_bytes(limit)} on {name}" for name, limit in limits.items())
    return (
        f"nothing fits the {request.num_devices} devices, with {have}, for a global batch of "
        f"{request.global_batch}; try more nodes{or_less_fixed(request)}",
    )


def or_less_fixed(request: SearchRequest, *others: str) -> str:
    """Return the ways beside the first, in words: fewer fixed choices only where some are."""
    fixed = fixed_choices(request)
    ways = [*others, *([f"without {' or '.join(f'`{n}`' for n in fixed)}"] if fixed else [])]
    if not ways:
        return ""
    *most, last = ways
    return "".join(f", {way}" for way in most) + f", or {last}"


def round_up(number: float, digits: int = 4) -> float:
    """Return a number of so many significant digits that is no smaller."""
    step = 10.0 ** (math.floor(math.log10(number)) - digits + 1)
    return float(f"{math.ceil(number / step) * step:.{digits}g}")
