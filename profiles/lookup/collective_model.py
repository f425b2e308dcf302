"""Time of a collective: measured on that group shape, else scaled from the nearest one.

A ring or a switch moves, through each rank's link, a fixed share of the full tensor, in an
all-to-all of what the rank has:

    all_reduce               2 (n-1)/n
    all_gather, reduce_scatter, all_to_all   (n-1)/n
    broadcast, send_recv     1

(the "bus bandwidth" factors of nccl-tests, doc/PERFORMANCE.md), so beta scales with the share
and with the bandwidth that the group has. alpha scales with the number of dependent steps, taken
as log2 n, twice for all_reduce.

Between nodes a ring crosses once for all ranks of a node, over all their links. In an all_to_all
each rank sends its own to other nodes, over its own link: (n - ranks of a node) / n of it. What
was measured of a ring says nothing of that.

What leaves a domain of a tier goes in two levels (`profiles.lookup.tiers`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2, sqrt

import numpy as np

from planner.cluster import ClusterSpec
from profiles.lookup.fit import levels_of, rising
from profiles.lookup.tiers import TwoLevels, two_levels
from profiles.lookup.wire import num_steps, wire_share
from profiles.records import CollectiveFit, CollectiveRecord, Group, Lookup, Piece

UNMEASURED_GROUP_ERROR = 0.2
"""Relative error added where a group shape stands in for another of the same level."""

INTERPOLATION_ERROR = 0.1
LINK_ERROR = 0.5


class CollectiveModel:
    """Answers for every kind, size and group from records, fits and the links.

    What holds for a kind on a group, whatever the size, is computed once and kept: immutable but
    for that.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        records: Sequence[CollectiveRecord],
        fits: Sequence[CollectiveFit],
    ) -> None:
        self._cluster = cluster
        self._fits = tuple(fits)
        self._records: dict[tuple[str, Group], list[CollectiveRecord]] = {}
        for record in sorted(records, key=lambda r: r.num_bytes):
            group = Group(ranks_per_node=record.ranks_per_node, num_nodes=record.num_nodes)
            self._records.setdefault((record.kind, group), []).append(record)
        self._curves: dict[tuple[str, Group], _Curve] = {}
        self._levels: dict[tuple[str, Group], TwoLevels] = {}

    def seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        """Return the time of a collective whose full tensor has `num_bytes`; of an all-to-all
        they are what each rank has.

        Raises ValueError for an unknown kind.
        """
        if group.domains and num_bytes > 0:
            return self._in_two_levels(kind, num_bytes, group)
        curve = self._curve_of(kind, group)
        if curve is None or num_bytes <= 0:
            return _NOTHING
        return curve.lookup(num_bytes)

    def _in_two_levels(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        levels = self._levels_of(kind, group)
        inside = [self.seconds(own, num_bytes, levels.inside) for own in levels.inside_kinds]
        return Lookup(
            seconds=levels.across_s(num_bytes) + sum(answer.seconds for answer in inside),
            source=f"{levels.link.name}, {kind} in two levels",
            relative_error=LINK_ERROR,
        )

    def _levels_of(self, kind: str, group: Group) -> TwoLevels:
        if (kind, group) not in self._levels:
            self._levels[kind, group] = two_levels(kind, group, self._cluster.tiers)
        return self._levels[kind, group]

    def least_s_per_byte(self, kind: str, group: Group, *, most_bytes: float) -> float:
        """Return seconds per byte that no collective of up to `most_bytes` goes below.

        Raises ValueError for an unknown kind.
        """
        if group.domains and most_bytes > 0:
            levels = self._levels_of(kind, group)
            return levels.across_s(most_bytes) / most_bytes + sum(
                self.least_s_per_byte(own, levels.inside, most_bytes=most_bytes)
                for own in levels.inside_kinds
            )
        curve = self._curve_of(kind, group)
        if curve is None or most_bytes <= 0:
            return 0.0
        return curve.least_per_byte(most_bytes)

    def _curve_of(self, kind: str, group: Group) -> _Curve | None:
        """Return the curve of a kind on a group; None where one rank is alone."""
        curve = self._curves.get((kind, group))
        if curve is None:
            wire_share(kind, 2)  # refuses an unknown kind
            if group.size == 1:
                return None
            curve = self._curves[kind, group] = self._curve(kind, group)
        return curve

    def _curve(self, kind: str, group: Group) -> _Curve:
        measured = _Samples.of(self._records.get((kind, group), ()))
        fit = self._nearest(kind, group)
        if fit is None:
            across = group.num_nodes > 1
            link = self._cluster.inter_node if across else self._cluster.intra_node
            piece = Piece(
                min_bytes=0.0,
                alpha_s=link.alpha_s * num_steps(kind, group.size),
                beta_s_per_byte=link.beta_s_per_byte * self._link_share(kind, group),
            )
            source = f"data-sheet rate of {link.name}"
            return _Curve.of((piece,), measured=measured, source=source, error=LINK_ERROR)
        if fit.kind == kind and fit.group == group:
            source = f"{fit.origin} for {kind} on {group}"
            return _Curve.of(fit.pieces, measured=measured, source=source, error=fit.relative_error)
        return _Curve.of(
            self._scaled(fit, kind, group),
            measured=measured,
            source=f"scaled from {fit.origin} {fit.kind} on {fit.group}",
            error=sqrt(fit.relative_error**2 + UNMEASURED_GROUP_ERROR**2),
            least_s_per_byte=self._least_s_per_byte(kind, group),
        )

    def _nearest(self, kind: str, group: Group) -> CollectiveFit | None:
        """Return the fit whose group is most like this one: level, kind, then size."""
        across = group.num_nodes > 1
        same_level = [fit for fit in self._fits if (fit.num_nodes > 1) == across]
        if kind != "send_recv":
            # A message between two ranks says little of a ring, so it stands in only for want of
            # others.
            same_level = [fit for fit in same_level if fit.kind != "send_recv"] or same_level
        if across and kind == "all_to_all":
            same_level = [fit for fit in same_level if fit.kind == kind]

        def unlikeness(fit: CollectiveFit) -> tuple[bool, float]:
            # Distance in octaves; another kind is farther than any size.
            apart = abs(log2(fit.ranks_per_node / group.ranks_per_node))
            return fit.kind != kind, apart + abs(log2(fit.num_nodes / group.num_nodes))

        return min(same_level, key=unlikeness, default=None)

    def _scaled(self, fit: CollectiveFit, kind: str, group: Group) -> tuple[Piece, ...]:
        """Return the fit's pieces as they hold for the same bytes on each link."""
        share = wire_share(kind, group.size) / self._width(group)
        share /= wire_share(fit.kind, fit.group.size) / self._width(fit.group)
        steps = num_steps(kind, group.size) / num_steps(fit.kind, fit.group.size)
        return tuple(
            piece.scaled(steps=steps, share=share).model_copy(
                # Pieces begin at bytes on a link: where a link carries less of the tensor, at a
                # larger one.
                update={"min_bytes": piece.min_bytes / share}
            )
            for piece in fit.pieces
        )

    def _least_s_per_byte(self, kind: str, group: Group) -> float:
        """Return what the wire alone takes when reductions are done on the way.

        Switches that reduce (NVLink SHARP) beat the ring's share inside a node, and trees
        beat it between nodes; a group without them, to which such a fit is scaled, does not.
        """
        if group.num_nodes == 1:
            share = 1.0 if kind == "all_reduce" else wire_share(kind, group.size)
            return share * self._cluster.intra_node.beta_s_per_byte
        share = wire_share(kind, group.num_nodes) / self._width(group)
        return share * self._cluster.inter_node.beta_s_per_byte

    def _link_share(self, kind: str, group: Group) -> float:
        """Return the share of the full tensor that crosses the slowest link of a rank."""
        if kind == "all_to_all" and group.num_nodes > 1:
            return (group.size - group.ranks_per_node) / group.size
        return wire_share(kind, group.size) / self._width(group)

    def _width(self, group: Group) -> float:
        """Return how many inter-node links carry a group that spans nodes, at most."""
        inside = self._cluster.intra_node.beta_s_per_byte
        if group.num_nodes == 1 or inside == 0:
            return 1.0
        # Each rank of a node has a link of its own to the other nodes. Together they carry no more
        # than the links inside can spread over them.
        return min(float(group.ranks_per_node), self._cluster.inter_node.beta_s_per_byte / inside)


_NOTHING = Lookup(seconds=0.0, source="nothing to send", relative_error=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Time by size for one kind on one group."""

    measured: _Samples
    """Sizes that were measured."""
    starts: tuple[float, ...]
    """Bytes from which each piece holds."""
    pieces: tuple[Piece, ...]
    """The fit, or the data sheet's line, for all other sizes."""
    levels: tuple[float, ...]
    """Seconds that the pieces before each one have reached: larger is never cheaper."""
    least_s_per_byte: float
    """What no fit of another group goes below: the wire's own rate."""
    source: str
    """Where the pieces are from."""
    error: float
    """Their relative error."""

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        *,
        measured: _Samples,
        source: str,
        error: float,
        least_s_per_byte: float = 0.0,
    ) -> _Curve:
        return cls(
            measured=measured,
            starts=tuple(piece.min_bytes for piece in pieces),
            pieces=tuple(pieces),
            levels=levels_of(pieces),
            least_s_per_byte=least_s_per_byte,
            source=source,
            error=error,
        )

    def lookup(self, num_bytes: float) -> Lookup:
        """Return what was measured there or around, else what was fitted."""
        return self.measured.at(num_bytes) or self.at(num_bytes)

    def least_per_byte(self, most_bytes: float) -> float:
        """Return the least of seconds over bytes among sizes up to `most_bytes`.

        Within a piece, and between two samples, that falls as the size rises, so it is least at
        their ends, or at `most_bytes`.
        """
        sizes = self.measured.sizes
        least = self.lookup(most_bytes).seconds / most_bytes
        for size, seconds in zip(sizes, self.measured.seconds, strict=True):
            if size <= most_bytes:
                least = min(least, seconds / size, self.at(size).seconds / size)
        for start, reached in zip(self.starts, self.levels, strict=True):
            # Between samples these answer and not the pieces.
            if 0 < start <= most_bytes and not (sizes and sizes[0] < start <= sizes[-1]):
                least = min(least, max(reached / start, self.least_s_per_byte))
        return least

    def at(self, num_bytes: float) -> Lookup:
        index = max(bisect_right(self.starts, num_bytes) - 1, 0)
        piece = self.pieces[index]
        seconds = max(
            self.levels[index],
            piece.seconds(num_bytes),
            num_bytes * self.least_s_per_byte,
        )
        return Lookup(seconds=seconds, source=self.source, relative_error=self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """Measured sizes in rising order; noise that falls with size is levelled out."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    errors: tuple[float, ...]

    @classmethod
    def of(cls, records: Sequence[CollectiveRecord]) -> _Samples:
        seconds = rising(np.array([r.seconds for r in records])) if records else ()
        return cls(
            sizes=tuple(record.num_bytes for record in records),
            seconds=tuple(float(s) for s in seconds),
            errors=tuple(record.standard_error for record in records),
        )

    def at(self, num_bytes: float) -> Lookup | None:
        """Return the record, or log-log interpolation; None outside the measured sizes."""
        index = bisect_left(self.sizes, num_bytes)
        if index == len(self.sizes):
            return None
        if self.sizes[index] == num_bytes:
            return Lookup(
                seconds=self.seconds[index],
                source="measured",
                relative_error=self.errors[index],
            )
        if index == 0:
            return None
        low, high = self.sizes[index - 1], self.sizes[index]
        # A straight line in the logarithms is a power law between two sizes.
        part = log(num_bytes / low) / log(high / low)
        below, above = self.seconds[index - 1], self.seconds[index]
        return Lookup(
            seconds=exp((1 - part) * log(below) + part * log(above)),
            source="interpolated",
            relative_error=INTERPOLATION_ERROR,
        )
