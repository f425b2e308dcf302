"""Lanes: what a rank exchanges, axis by axis, and what of it nothing runs beside.

    compute   [ F0.0          ][wait][ B0.0                ]
    tp          [~~][#] [~~][#]        [~~~~][#]   [~~~][##]       ~ beside compute
    pp from 1                  [~~~~~###]                          # exposed

Of recorded spans what runs beside a collective is BESIDE in it; waits, and sums of gradients that
are waited for, are exposed. A simulated span has its hidden part first (`Span.hidden_s`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from planner.timeline.spans import (
    BESIDE,
    CHECK,
    COLLECTIVE,
    DEAL,
    MESSAGE,
    REDUCE,
    WAIT,
    RankTimeline,
    Span,
)

REPLICAS, STAGES, EVERYBODY = "dp", "pp", "all ranks"
_LANE_OF = {
    COLLECTIVE: "collectives",  # (Before version 3 without their axis.)
    MESSAGE: STAGES,
    REDUCE: REPLICAS,
    WAIT: STAGES,
    CHECK: EVERYBODY,
    DEAL: EVERYBODY,
}
_INNER = ("tp", "etp", "cp", "hp", "ep")


def lane_of(span: Span) -> str:
    """Return the lane that a span is in; "" of what is not exchanged."""
    return span.lane or _LANE_OF.get(span.kind, "")


def lane_from(pp_rank: int) -> str:
    """Return the lane of messages from another pp rank."""
    return f"{STAGES} from {pp_rank}"


def in_order(lanes: set[str]) -> list[str]:
    """Return lanes from the innermost axis to what comes from other stages."""

    def place(lane: str) -> tuple[int, int, str]:
        if lane in _INNER:
            return 0, _INNER.index(lane), lane
        if lane.startswith(STAGES):
            _, _, sender = lane.rpartition(" ")
            return 3, int(sender) if sender.isdigit() else -1, lane
        return (4 if lane == EVERYBODY else 2 if lane == REPLICAS else 1), 0, lane

    return sorted(lanes, key=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a rank exchanges in a lane, from its start until its result is used."""

    lane: str
    """An axis of the mesh, or whom messages come from."""
    span: Span
    """What, and when."""
    exposed: tuple[tuple[float, float], ...]
    """Stretches of it in which nothing runs beside it."""

    @property
    def exposed_s(self) -> float:
        """Seconds of those."""
        return sum(end_s - start_s for start_s, end_s in self.exposed)

    @property
    def hidden_s(self) -> float:
        """The other seconds."""
        return max(0.0, self.span.end_s - self.span.start_s - self.exposed_s)


def exchanges(line: RankTimeline) -> Iterator[Exchange]:
    """Yield what a rank exchanges, in the order of its spans."""
    beside = sorted((s.start_s, s.end_s) for s in line.spans if s.kind == BESIDE)
    starts = [start_s for start_s, _ in beside]
    for span in line.spans:
        if lane := lane_of(span):
            # What runs beside a collective began after it, and ended before it.
            inside = beside[bisect_left(starts, span.start_s) : bisect_left(starts, span.end_s)]
            if span.kind != COLLECTIVE:
                inside = []
            if span.hidden_s:
                inside = [(span.start_s, min(span.start_s + span.hidden_s, span.end_s))]
            yield Exchange(lane=lane, span=span, exposed=tuple(_without(span, inside)))


def _without(span: Span, beside: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    at = span.start_s
    for start_s, end_s in beside:
        if start_s > at:
            yield at, start_s
        at = max(at, end_s)
    if at < span.end_s:
        yield at, span.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSeconds:
    """What a rank exchanged in one lane in one step."""

    rank: int
    """The rank."""
    step: int
    """Number of the step, from 0."""
    lane: str
    """The lane."""
    hidden_s: float
    """Seconds beside compute."""
    exposed_s: float
    """Seconds beside which nothing ran."""


def lane_seconds(line: RankTimeline) -> tuple[LaneSeconds, ...]:
    """Return what a rank exchanged, by step, then lane."""
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for each in exchanges(line):
        key = each.span.step, each.lane
        hidden_s, exposed_s = found.get(key, (0.0, 0.0))
        found[key] = hidden_s + each.hidden_s, exposed_s + each.exposed_s
    order = {lane: place for place, lane in enumerate(in_order({lane for _, lane in found}))}
    return tuple(
        LaneSeconds(rank=line.rank, step=step, lane=lane, hidden_s=seconds[0], exposed_s=seconds[1])
        for (step, lane), seconds in sorted(
            found.items(), key=lambda item: (item[0][0], order[item[0][1]])
        )
    )
