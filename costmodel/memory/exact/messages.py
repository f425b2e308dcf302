"""What travels between a rank and others: receive buffers there early, sent values there late.

Receives from one rank are posted in the order in which it sends, so one that is wanted soon
brings those that are sent before it. On gloo, which does not tell when a message has left, what
was sent is kept until something arrives that its taker sent later
(`planner.runtime.step.messages.p2p`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.language.lowering.wiring import Edge
from planner.language.schedule.jobs import Job, JobKind


class Arrival(NamedTuple):
    """A value of a microbatch that goes along an edge, or its gradient that comes back."""

    edge: int
    """Position among the edges of the plan."""
    is_grad: bool
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a pp rank gets and sends in a step."""

    orders: Mapping[int, Sequence[Arrival]] = field(default_factory=dict)
    """What each other rank sends, in order; left out where that is the order of need."""
    made_at: Mapping[Arrival, int] = field(default_factory=dict)
    """At which of the other rank's jobs something is made that comes here; empty where nothing
    sent is kept."""
    taken_at: Mapping[Arrival, int] = field(default_factory=dict)
    """At which of the other rank's jobs something is taken that goes there; likewise."""


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
    degree.
    """
    # By other rank, then by (stage there, is_grad): what that stage makes, or takes.
    made: dict[int, dict[tuple[int, bool], list[Edge]]] = {}
    taken: dict[int, dict[tuple[int, bool], list[Edge]]] = {}
    spread: set[tuple[int, bool]] = set()
    for edge in edges:
        for is_grad in (False, True) if edge.requires_grad else (False,):
            # A gradient goes the other way along the edge of its value.
            ends = (edge.consumer, edge.producer) if is_grad else (edge.producer, edge.consumer)
            source, target = map(home, ends)
            if source == target or here not in (source, target):
                continue
            comes = target == here
            there = ends[0] if comes else ends[1]
            by_other = made if comes else taken
            by_other.setdefault(home(there), {}).setdefault((there, is_grad), []).append(edge)
            if keeps_sent and not comes and tp(ends[1]) > tp(ends[0]):
                spread.add((edge.index, is_grad))
    orders: dict[int, list[Arrival]] = {}
    made_at: dict[Arrival, int] = {}
    taken_at: dict[Arrival, int] = {}
    for other in made.keys() | taken.keys():
        coming = made.get(other, {})
        # Along a single edge things arrive in the order in which they are needed: no receive is
        # posted earlier than it is needed.
        if not keeps_sent and sum(map(len, coming.values())) <= 1:
            continue
        made_here = _positions(rows[other], coming)
        orders[other] = list(made_here)
        if keeps_sent:
            made_at |= made_here
            for arrival, position in _positions(rows[other], taken.get(other, {})).items():
                # Where more tp ranks get it than have it, not all of them answer who sent it: it
                # is kept to the end of the step.
                is_spread = (arrival.edge, arrival.is_grad) in spread
                taken_at[arrival] = len(rows[other]) if is_spread else position
    return Traffic(orders=orders, made_at=made_at, taken_at=taken_at)


def _positions(
    row: Sequence[Job], edges: Mapping[tuple[int, bool], Sequence[Edge]]
) -> dict[Arrival, int]:
    """At which job of a row what the edges carry is made or taken, in order."""
    return {
        Arrival(edge.index, is_grad, job.microbatch_index): position
        for position, job in enumerate(row)
        if job.kind is not JobKind.BACKWARD_WEIGHT
        # Forwards make and take values, backwards gradients; a job of weight gradients neither.
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
        # A channel delivers in order, so all that was sent ahead of it gets its buffer, too.
        posted = []
        queue = self._coming[source]
        while wanted not in self._posted and queue:
            posted.append(queue.popleft())
            self._posted.add(posted[-1])
        return posted
