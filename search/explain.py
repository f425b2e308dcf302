"""Why not that layout: the choices a user fixed against the best plan, in numbers that add up.

Both sides are searched: the fixed choices leave the rest open, so what is compared is the
best that can be made of them. A side that does not fit is priced at its smallest anyway, to
say which rank needs how much memory for what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planner.graph import ModelGraph
from planner.plan import Plan
from planner.units import format_bytes
from profiles import Profile
from search.find_plan import find_plan
from search.request import SearchRequest

Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best plan under the fixed choices beside the best of all.

    `given` is None when the choices do not fit the memory; `shortfall` then says what does
    not, one sentence for each pp rank that is over. `best` is None when nothing fits at all.
    """

    given: Plan | None
    best: Plan | None
    shortfall: tuple[str, ...]


def compare_choices(
    graph: ModelGraph, profile: Profile, request: SearchRequest, progress: Progress | None = None
) -> Comparison:
    """Search with the request's fixed choices and without them.

    Raises LayoutError, naming the rule, when the choices can't be met by any plan.
    """
    fixed = find_plan(graph, profile, request, _half(progress, 0.0))
    free = replace(
        request,
        dp=None,
        tp=None,
        pp=None,
        vpp=None,
        cp=None,
        microbatch_size=None,
        schedule=None,
        zero=None,
        recompute=None,
        pins=(),
        balance=(),
    )
    best = find_plan(graph, profile, free, _half(progress, 0.5)).plan
    if fixed.plan is not None:
        return Comparison(given=fixed.plan, best=best, shortfall=())
    limit = float(request.memory_limit_bytes or profile.memory_bytes)
    enough = replace(request, memory_limit_bytes=fixed.smallest_memory_bytes)
    smallest = find_plan(graph, profile, enough).plan
    shortfall = fixed.reasons if smallest is None else explain_shortfall(smallest, limit)
    return Comparison(given=None, best=best, shortfall=shortfall)


def explain_shortfall(plan: Plan, limit_bytes: float) -> tuple[str, ...]:
    """Say, for each pp rank over the limit, what it needs memory for, largest part first."""
    sentences = []
    for pp_rank, parts in enumerate(plan.estimate["memory"]):
        needed = parts["total_bytes"]
        if needed <= limit_bytes:
            continue
        named = sorted(
            ((size, name) for name, size in parts.items() if name != "total_bytes" and size),
            reverse=True,
        )
        listed = ", ".join(f"{_words(name)} {format_bytes(size)}" for size, name in named)
        sentences.append(
            f"pp rank {pp_rank} needs {format_bytes(needed)} of {format_bytes(limit_bytes)} "
            f"at the least: {listed}"
        )
    return tuple(sentences)


def differences(given: dict[str, Any], best: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return (part, seconds given, seconds best) of two estimates, the largest loss first."""
    rows = [(name, given["time"][name], best["time"][name]) for name in given["time"]]
    return sorted(
        (row for row in rows if row[1] or row[2]), key=lambda row: row[1] - row[2], reverse=True
    )


def _words(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _half(progress: Progress | None, start: float) -> Progress | None:
    """Return progress over half of the bar, beginning at `start`."""
    if progress is None:
        return None
    return lambda fraction, doing: progress(start + fraction / 2, doing)
