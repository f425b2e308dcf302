"""What travels between a rank and others: receive buffers there early, sent values there late.

Receives from one rank are posted in the order in which it sends, so one that is wanted soon
brings those that are sent before it. On gloo, which does not tell when a message has left, what
was sent is kept until something arrives that its taker sent later (`planner.runtime.step.p2p`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.runtime.step.wiring import Edge
from planner.schedule.jobs import Job, JobKind


class Arrival(NamedTuple):
    """A value of a microbatch on its variant forward, or its gradient on its variant back."""

    producer: int
    consumer: int
    name: str
    is_grad: bool
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a pp rank gets and sends in a step.

    `orders` is what each other rank sends, in order; left out where that is the order of need.
    `made_at` and `taken_at` tell at which of the other's jobs something is made that comes
    here, and taken that goes there; empty where nothing sent is kept.
    """

    orders: Mapping[int, Sequence[Arrival]] = field(default_factory=dict)
    made_at: Mapping[Arrival, int] = field(default_factory=dict)
    taken_at: Mapping[Arrival, int] = field(default_factory=dict)


def find_traffic(
    rows: Sequence[Sequence[Job]],
    edges: Sequence[Edge],
    home: Callable[[int], int],
    here: int,
    *,
    keeps_sent: bool,
    tp: Callable[[int], int] = lambda stage: 1,
) -> Traffic:
    """Return the traffic of pp rank `here`; `home` gives the pp rank of a stage, and `tp` its tp
    degree. Where more tp ranks get a message than send it, not all of them answer who sent it,
    and that is kept to the end of the step.
    """
    made: dict[int, dict[tuple[int, bool], list[Edge]]] = {}
    taken: dict[int, dict[tuple[int, bool], list[Edge]]] = {}
    for edge in edges:
        source, target = home(edge.producer), home(edge.consumer)
        if source == target or here not in (source, target):
            continue
        other = target if source == here else source
        at, back_at = (taken, made) if source == here else (made, taken)
        end = _end(edge, other, home)
        at.setdefault(other, {}).setdefault((end, False), []).append(edge)
        if edge.requires_grad:
            back_at.setdefault(other, {}).setdefault((end, True), []).append(edge)
    orders: dict[int, list[Arrival]] = {}
    made_at: dict[Arrival, int] = {}
    taken_at: dict[Arrival, int] = {}
    for other in made.keys() | taken.keys():
        if keeps_sent or sum(map(len, made.get(other, {}).values())) > 1:
            made_here = _played(rows[other], made.get(other, {}))
            orders[other] = list(made_here)
            if keeps_sent:
                made_at |= made_here
                goes = taken.get(other, {})
                taken_at |= _played(rows[other], goes)
                taken_at |= {
                    arrival: len(rows[other]) for arrival in taken_at if _spreads(arrival, tp)
                }
    return Traffic(orders=orders, made_at=made_at, taken_at=taken_at)


def _spreads(arrival: Arrival, tp: Callable[[int], int]) -> bool:
    """Whether more tp ranks get it than have it."""
    has, gets = (
        (arrival.consumer, arrival.producer)
        if arrival.is_grad
        else (arrival.producer, arrival.consumer)
    )
    return tp(gets) > tp(has)


def _end(edge: Edge, rank: int, home: Callable[[int], int]) -> int:
    """The stage of an edge that a rank holds."""
    return edge.producer if home(edge.producer) == rank else edge.consumer


def _played(
    row: Sequence[Job], edges: Mapping[tuple[int, bool], Sequence[Edge]]
) -> dict[Arrival, int]:
    """At which job of a row what the edges carry is made or taken, in order."""
    return {
        Arrival(edge.producer, edge.consumer, edge.tensor, is_grad, job.microbatch_index): position
        for position, job in enumerate(row)
        if job.kind is not JobKind.BACKWARD_WEIGHT
        for is_grad in (job.kind is not JobKind.FORWARD,)
        for edge in edges.get((job.stage_index, is_grad), ())
    }


class Receives:
    """What was posted so far in a step. Mutable."""

    def __init__(self, traffic: Traffic) -> None:
        self._coming = {source: deque(order) for source, order in traffic.orders.items()}
        self._posted: set[Arrival] = set()

    def expect(self, source: int, wanted: Arrival) -> list[Arrival]:
        """Return what is posted now that `wanted` is."""
        if source not in self._coming:
            return [wanted]
        posted = []
        queue = self._coming[source]
        while wanted not in self._posted and queue:
            posted.append(queue.popleft())
            self._posted.add(posted[-1])
        return posted
