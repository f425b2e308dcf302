"""Time of a collective: measured on that group shape, else scaled from the nearest one.

A ring or a switch moves, through each rank's link, a fixed share of the full tensor:

    all_reduce               2 (n-1)/n
    all_gather, reduce_scatter, all_to_all   (n-1)/n
    broadcast, send_recv     1

(the "bus bandwidth" factors of nccl-tests, doc/PERFORMANCE.md), so beta scales with the share
and with the bandwidth that the group has. alpha scales with the number of dependent steps,
taken as log2 n, twice for all_reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, log2, sqrt

import numpy as np

from planner.cluster import ClusterSpec
from profiles.fit import piecewise_at, rising
from profiles.records import CollectiveFit, CollectiveRecord, Group, Lookup, Piece

UNMEASURED_GROUP_ERROR = 0.2
"""Relative error added where a group shape stands in for another of the same level."""


class CollectiveModel:
    """Answers for every kind, size and group from records, fits and the links."""

    def __init__(
        self,
        cluster: ClusterSpec,
        records: Sequence[CollectiveRecord],
        fits: Sequence[CollectiveFit],
    ) -> None:
        self._cluster = cluster
        self._fits = tuple(fits)
        measured: dict[tuple[str, Group], list[CollectiveRecord]] = {}
        for record in sorted(records, key=lambda r: r.num_bytes):
            group = Group(ranks_per_node=record.ranks_per_node, num_nodes=record.num_nodes)
            measured.setdefault((record.kind, group), []).append(record)
        self._measured = {key: _without_descents(found) for key, found in measured.items()}

    def seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the time of a collective whose full tensor has `num_bytes`.

        Raises ValueError for an unknown kind.
        """
        wire_share(kind, 2)
        if group.size == 1 or num_bytes <= 0:
            return Lookup(seconds=0.0, source="nothing to send", relative_error=0.0)
        if found := _between(self._measured.get((kind, group), ()), num_bytes):
            return found
        if fit := self._nearest(kind, group):
            return self._scaled(fit, kind, num_bytes, group)
        return self._from_link(kind, num_bytes, group)

    def _nearest(self, kind: str, group: Group) -> CollectiveFit | None:
        """Return the fit whose group is most like this one: level, kind, then size."""
        across = group.num_nodes > 1
        same_level = [fit for fit in self._fits if (fit.num_nodes > 1) == across]
        if kind != "send_recv":
            same_level = [fit for fit in same_level if fit.kind != "send_recv"] or same_level

        def unlikeness(fit: CollectiveFit) -> tuple[bool, float]:
            apart = abs(log2(fit.ranks_per_node / group.ranks_per_node))
            return fit.kind != kind, apart + abs(log2(fit.num_nodes / group.num_nodes))

        return min(same_level, key=unlikeness, default=None)

    def _scaled(self, fit: CollectiveFit, kind: str, num_bytes: float, group: Group) -> Lookup:
        if fit.kind == kind and fit.group == group:
            return Lookup(
                seconds=piecewise_at(fit.pieces, num_bytes),
                source=f"{fit.origin} for {kind} on {group}",
                relative_error=fit.relative_error,
            )
        wire_bytes = wire_share(kind, group.size) / self._width(group) * num_bytes
        fit_share = wire_share(fit.kind, fit.group.size) / self._width(fit.group)
        # The same bytes on each link, hence the same point of the measured curve.
        piece = _piece_at(fit.pieces, wire_bytes / fit_share)
        steps = num_steps(kind, group.size) / num_steps(fit.kind, fit.group.size)
        seconds = piece.alpha_s * steps + piece.beta_s_per_byte * wire_bytes / fit_share
        return Lookup(
            seconds=max(seconds, self._least_seconds(kind, num_bytes, group)),
            source=f"scaled from {fit.origin} {fit.kind} on {fit.group}",
            relative_error=sqrt(fit.relative_error**2 + UNMEASURED_GROUP_ERROR**2),
        )

    def _least_seconds(self, kind: str, num_bytes: float, group: Group) -> float:
        """Return what the wire alone takes when reductions are done on the way.

        Switches that reduce (NVLink SHARP) beat the ring's share inside a node, and trees
        beat it between nodes; a group without them, to which such a fit is scaled, does not.
        """
        if group.num_nodes == 1:
            share = 1.0 if kind == "all_reduce" else wire_share(kind, group.size)
            return share * num_bytes * self._cluster.intra_node.beta_s_per_byte
        share = wire_share(kind, group.num_nodes) / self._width(group)
        return share * num_bytes * self._cluster.inter_node.beta_s_per_byte

    def _width(self, group: Group) -> float:
        """Return how many inter-node links carry a group that spans nodes, at most."""
        if group.num_nodes == 1:
            return 1.0
        inside = self._cluster.intra_node.beta_s_per_byte
        return min(float(group.ranks_per_node), self._cluster.inter_node.beta_s_per_byte / inside)

    def _from_link(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        across = group.num_nodes > 1
        link = self._cluster.inter_node if across else self._cluster.intra_node
        wire_bytes = wire_share(kind, group.size) / self._width(group) * num_bytes
        return Lookup(
            seconds=link.alpha_s * num_steps(kind, group.size) + link.beta_s_per_byte * wire_bytes,
            source=f"data-sheet rate of {link.name}",
            relative_error=0.5,
        )


def wire_share(kind: str, size: int) -> float:
    """Return the share of the full tensor that crosses each rank's link."""
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    if kind in ("broadcast", "send_recv"):
        return 1.0
    raise ValueError(
        f"collective {kind!r} is unknown; use all_reduce, all_gather, reduce_scatter, "
        "all_to_all, broadcast or send_recv"
    )


def num_steps(kind: str, size: int) -> float:
    """Return the number of dependent messages, which is what alpha counts."""
    if kind == "send_recv":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * max(log2(size), 1.0)


def _piece_at(pieces: Sequence[Piece], num_bytes: float) -> Piece:
    return max(
        (piece for piece in pieces if piece.min_bytes <= num_bytes),
        key=lambda piece: piece.min_bytes,
        default=pieces[0],
    )


def _without_descents(records: Sequence[CollectiveRecord]) -> list[CollectiveRecord]:
    """Level out noise: a larger message never takes less time than a smaller one."""
    seconds = rising(np.array([record.seconds for record in records]))
    return [
        record.model_copy(update={"seconds": float(level)})
        for record, level in zip(records, seconds, strict=True)
    ]


def _between(records: Sequence[CollectiveRecord], num_bytes: float) -> Lookup | None:
    """Interpolate log time over log size between measured sizes; None outside of them."""
    for record in records:
        if record.num_bytes == num_bytes:
            error = record.spread / sqrt(record.repeats)
            return Lookup(seconds=record.seconds, source="measured", relative_error=error)
    for low, high in pairwise(records):
        if low.num_bytes < num_bytes < high.num_bytes:
            part = log(num_bytes / low.num_bytes) / log(high.num_bytes / low.num_bytes)
            seconds = exp((1 - part) * log(low.seconds) + part * log(high.seconds))
            return Lookup(seconds=seconds, source="interpolated", relative_error=0.1)
    return None
