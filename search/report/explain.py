"""Why not that layout: the choices a user fixed against the best plan, in numbers that add up.

Both sides are searched: the fixed choices leave the rest open, so what is compared is the
best that can be made of them. A side that does not fit is priced at its smallest anyway, to
say which rank needs how much memory for what. Bytes are rounded so that the parts shown add up to
the total shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.units import GIB, KIB, MIB
from profiles import Profile
from search.branch_and_bound import Progress
from search.find_plan import find_plan
from search.report.words import MEMORY_WORDS
from search.request import CHOICES, SearchRequest


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best plan under the fixed choices beside the best of all.

    `given` is None when the choices do not fit the memory; `shortfall` then says what does
    not, one sentence for each pp rank that is over. `best` is None when nothing fits at all.
    `profile` is the machine they are priced on.
    """

    given: Plan | None
    best: Plan | None
    shortfall: tuple[str, ...]
    profile: Profile


def compare_choices(
    graph: ModelGraph, profile: Profile, request: SearchRequest, progress: Progress | None = None
) -> Comparison:
    """Search with the request's fixed choices and without them.

    Raises LayoutError, naming the rule, when the choices can't be met by any plan.
    """
    fixed = find_plan(graph, profile, request, _half(progress, 0.0))
    nothing: dict[str, Any] = dict.fromkeys(CHOICES)
    free = replace(request, **nothing, pins=(), balance=(), split_rank=None)
    best = find_plan(graph, profile, free, _half(progress, 0.5)).plan
    if fixed.plan is not None:
        return Comparison(given=fixed.plan, best=best, shortfall=(), profile=profile)
    if fixed.leanest is None:  # on several groups of devices
        raise LayoutError(fixed.reasons[0])
    limit = request.limit_bytes(profile)
    return Comparison(
        given=None,
        best=best,
        shortfall=explain_shortfall(fixed.leanest, limit) or fixed.reasons,
        profile=profile,
    )


def explain_shortfall(plan: Plan, limit_bytes: float) -> tuple[str, ...]:
    """Say, for each pp rank over the limit, what it needs memory for, largest part first."""
    sentences = []
    for pp_rank, parts in enumerate(plan.estimate["memory"]):
        needed = parts["total_bytes"]
        if needed <= limit_bytes:
            continue
        unit, size = byte_unit(needed)
        digits = digits_to_tell(needed / size, limit_bytes / size)
        listed = listed_parts(memory_parts(parts), size, digits=digits)
        sentences.append(
            f"{stages_of(plan, pp_rank)} needs {needed / size:.{digits}f} {unit} of "
            f"{limit_bytes / size:.{digits}f} at the least: {listed}"
        )
    return tuple(sentences)


def explain_saving(leanest: Plan, made: Plan) -> str:
    """Say what another plan's fullest device needs less and more than the leanest one's."""
    before, after = fullest_rank(leanest), fullest_rank(made)
    old, new = memory_parts(before), memory_parts(after)
    parts = {name: new.get(name, 0) - old.get(name, 0) for name in {**old, **new}}
    unit, size = byte_unit(before["total_bytes"])
    change = after["total_bytes"] - before["total_bytes"]
    if not any(parts.values()):
        return "no difference"
    return f"{change / size:+.2f} {unit}: {listed_parts(parts, size, signed=True)}"


def stages_of(plan: Plan, pp_rank: int) -> str:
    """Name a pp rank by what it holds: ``stage 3 (blocks 9..12)``."""
    held = [(index, s) for index, s in enumerate(plan.stages) if s.pp_rank == pp_rank]
    if plan.pp == 1:
        return "every rank"
    if len(held) == 1:
        index, stage = held[0]
        return f"stage {index} (blocks {stage.first_block}..{stage.last_block})"
    return f"pp rank {pp_rank} (stages {', '.join(str(index) for index, _ in held)})"


def fullest_rank(plan: Plan) -> dict[str, int]:
    """Return the memory parts of the pp rank that needs most."""
    ranks: list[dict[str, int]] = plan.estimate["memory"]
    return max(ranks, key=lambda parts: parts["total_bytes"])


def memory_parts(parts: dict[str, int]) -> dict[str, int]:
    """Return the device's parts by the words for them; they add up to the total."""
    return {
        MEMORY_WORDS[name]: size
        for name, size in parts.items()
        if name not in ("total_bytes", "host_bytes")
    }


def differences(given: dict[str, Any], best: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return (part, seconds given, seconds best) of two estimates, the largest loss first."""
    rows = [(name, given["time"][name], best["time"][name]) for name in given["time"]]
    return sorted(
        (row for row in rows if row[1] or row[2]), key=lambda row: row[1] - row[2], reverse=True
    )


def _half(progress: Progress | None, start: float) -> Progress | None:
    """Return progress over half of the bar, beginning at `start`."""
    if progress is None:
        return None
    return lambda fraction, doing: progress(start + fraction / 2, doing)


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """Return the unit to show an amount in, with its size."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return unit, size
    return "B", 1


def rounded_parts(parts: Sequence[float], *, digits: int = 2) -> list[float]:
    """Round parts down, then up where most was lost, until they add up to the rounded sum."""
    scaled = [part * 10**digits for part in parts]
    steps = [floor(value) for value in scaled]
    # Each part lost less than a step: those that lost most get one back, until the sum is right.
    missing = round(sum(scaled)) - sum(steps)
    by_loss = sorted(range(len(parts)), key=lambda index: steps[index] - scaled[index])
    for index in by_loss[:missing]:
        steps[index] += 1
    return [step / 10**digits for step in steps]


def digits_to_tell(amount: float, other: float) -> int:
    """Return how many decimals two different amounts need to look different, 2 at the least."""
    return next((d for d in range(2, 9) if round(amount, d) != round(other, d)), 9)


def listed_parts(
    parts: Mapping[str, float], unit_bytes: int, *, digits: int = 2, signed: bool = False
) -> str:
    """Return ``weights 21.00, gradients 10.50`` in a unit, the largest first, without zeros.

    Signed parts are changes: ``activations -24.00, communication +0.80``.
    """
    names = sorted(parts, key=lambda name: -abs(parts[name]))
    shown = rounded_parts([parts[name] / unit_bytes for name in names], digits=digits)
    form = f"{'+' if signed else ''}.{digits}f"
    return ", ".join(
        f"{name} {amount:{form}}" for name, amount in zip(names, shown, strict=True) if amount
    )
