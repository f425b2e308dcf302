"""Time of an operator: measured, else interpolated, else roofline with fitted efficiency.

Interpolation is kriging (a Gaussian process) of the *logarithm* of measured over fitted time,
in the log2 coordinates of `profiles.lookup.families.features`:

    log t(q) = log t_fit(q) + k(q)' (K + D)^-1 r,      r_i = log t_i - log t_fit(i)

with K the covariance s^2 exp(-|x_i - x_j|^2 / (2 l^2)) among the measured points, k(q) that
between them and q, and D the variance of each measurement. Near measured points it follows
them; far from all of them it returns to the fit. Its posterior deviation is the error bar.
The answer is then held between the slowest measured op that is smaller in every coordinate
and the fastest that is larger, so that more work never looks cheaper than what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, hypot, sqrt

import numpy as np
from numpy.typing import NDArray

from planner.cluster import ClusterSpec
from profiles.lookup.families import BLOCK, canonical_shapes, family_of, features
from profiles.records import Lookup, OpFit, OpQuery, OpRecord

LENGTH_SCALE = 2.0
"""In log2 units: sizes a factor of 4 apart still inform each other strongly."""

MIN_POINTS = 3
"""Fewer measured points than this are not interpolated; the fit alone answers."""

_Floats = NDArray[np.float64]


class OpModel:
    """Answers `OpQuery`s from records and fits. Immutable but for a cache of answers."""

    def __init__(
        self, cluster: ClusterSpec, records: Sequence[OpRecord], fits: Sequence[OpFit]
    ) -> None:
        self._peaks = dict(cluster.peak_flop_per_s)
        self._memory_bytes_per_s = cluster.memory_bytes_per_s
        self._fits = {(fit.family, fit.dtype, fit.direction): fit for fit in fits}
        self._exact: dict[tuple, list[OpRecord]] = {}
        for record in records:
            self._exact.setdefault(record_key(record), []).append(record)
        self._surfaces = self._build_surfaces(records)
        self._answers: dict[OpQuery, Lookup] = {}

    def seconds(self, query: OpQuery) -> Lookup:
        """Return the time of one operator, what it stands on, and its error bar."""
        if not self._exact:
            return self.roofline(query)  # as quickly found as remembered
        answer = self._answers.get(query)
        if answer is None:
            answer = self._answers[query] = self._look_up(query)
        return answer

    def _look_up(self, query: OpQuery) -> Lookup:
        if same := self._exact.get(record_key(query)):
            # Records of equal shapes may differ in a flag (causal attention), and then in flop.
            record = min(same, key=lambda r: abs(r.flop - query.flop))
            return Lookup(
                seconds=record.seconds,
                source="measured",
                relative_error=record.standard_error,
            )
        base = self.roofline(query)
        for name in (query.target, family_of(query.target)):
            surface = self._surfaces.get((name, query.dtype, query.direction))
            if surface is not None and query.num_bytes + query.flop > 0:
                return surface.at(query, base)
        return base

    def roofline(self, query: OpQuery) -> Lookup:
        """Return the fitted or, without any fit that applies, the data-sheet roofline."""
        for name in (query.target, family_of(query.target)):
            if fit := self._fits.get((name, query.dtype, query.direction)):
                return Lookup(
                    seconds=self._not_beyond_peak(fit, query),
                    source=f"roofline, {fit.origin} for {name}",
                    relative_error=max(fit.relative_error, 0.01),
                )
        return self._other_dtype(query) or self._data_sheet(query)

    def _not_beyond_peak(self, fit: OpFit, query: OpQuery) -> float:
        """Hold a fit to large published ops within the data sheet's rates for small ones.

        A measured fit is left alone: small ops run from caches, faster than memory.
        """
        seconds = _fitted(fit, query.flop, query.num_bytes)
        if fit.origin == "measured":
            return seconds
        return max(seconds, self._data_sheet(query).seconds)

    def _other_dtype(self, query: OpQuery) -> Lookup | None:
        """Use the fit of another dtype, its flop rate scaled by the ratio of peak rates."""
        family = family_of(query.target)
        peak = self._peaks.get(query.dtype)
        for (name, dtype, direction), fit in self._fits.items():
            if name != family or direction != query.direction:
                continue
            # At a lower peak each flop takes longer; bytes take what they took.
            slower = self._peaks[dtype] / peak if peak and dtype in self._peaks else 1.0
            return Lookup(
                seconds=_fitted(fit, query.flop * slower, query.num_bytes),
                source=f"roofline, {fit.origin} for {family} in {dtype}, scaled to {query.dtype}",
                relative_error=hypot(fit.relative_error, 0.3),
            )
        return None

    def _data_sheet(self, query: OpQuery) -> Lookup:
        peak = self._peaks.get(query.dtype) or max(self._peaks.values())
        seconds = max(query.flop / peak, query.num_bytes / self._memory_bytes_per_s)
        return Lookup(seconds=seconds, source="roofline, peak rates", relative_error=1.0)

    def _build_surfaces(self, records: Sequence[OpRecord]) -> dict[tuple, _Surface]:
        groups: dict[tuple, list[OpRecord]] = {}
        for record in records:
            if family_of(record.target) == BLOCK:
                continue
            for name in {record.target, family_of(record.target)}:
                groups.setdefault((name, record.dtype, record.direction), []).append(record)
        return {
            key: _Surface.through(group, [self.roofline(query_of(r)).seconds for r in group])
            for key, group in groups.items()
            if len(group) >= MIN_POINTS
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surface:
    """Kriging of log(measured / fitted) over one family, of n records in d coordinates.

    Shapes: points (n, d), seconds and weights (n,), inverse (n, n): (K + D)^-1 of the header, and
    weights that times r.
    """

    points: _Floats
    seconds: _Floats
    weights: _Floats
    inverse: _Floats
    variance: float

    @classmethod
    def through(cls, records: Sequence[OpRecord], fitted: Sequence[float]) -> _Surface:
        points = np.array([features(query_of(r)) for r in records])
        seconds = np.array([r.seconds for r in records])
        residual = np.log(seconds) - np.log(np.maximum(fitted, 1e-12))
        # Robust scale of how far real ops lie from the fit: 1.48 times the median distance is the
        # deviation of a normal distribution. The floor keeps K invertible.
        variance = max(float(np.median(np.abs(residual))) * 1.48, 0.05) ** 2
        noise = np.array([max(r.standard_error, 0.02) ** 2 for r in records])
        covariance = variance * _correlation(points, points) + np.diag(noise)
        inverse = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        return cls(
            points=points,
            seconds=seconds,
            weights=inverse @ residual,
            inverse=inverse,
            variance=variance,
        )

    def at(self, query: OpQuery, base: Lookup) -> Lookup:
        point = np.array(features(query))
        k = self.variance * _correlation(self.points, point[None, :])[:, 0]
        left = max(self.variance - float(k @ self.inverse @ k), 0.0)
        # No measured point is near: what is left is nearly all of the prior variance.
        if left > 0.9 * self.variance:
            return base
        seconds = base.seconds * exp(float(k @ self.weights))
        # Ops that are smaller, or larger, in every coordinate bound the time. Where disturbed
        # measurements contradict each other they bound nothing.
        below = (self.points <= point).all(axis=1)
        above = (self.points >= point).all(axis=1)
        low = float(self.seconds[below].max(initial=0.0))
        high = float(self.seconds[above].min(initial=np.inf))
        if low <= high:
            seconds = min(max(seconds, low), high)
        return Lookup(seconds=seconds, source="interpolated", relative_error=sqrt(left + 0.02**2))


def query_of(record: OpRecord) -> OpQuery:
    """Return the query that a record answers."""
    return OpQuery(
        target=record.target,
        shapes=record.shapes,
        dtype=record.dtype,
        direction=record.direction,
        flop=record.flop,
        num_bytes=record.num_bytes,
    )


def record_key(item: OpRecord | OpQuery) -> tuple:
    """Return what must be equal for a record to answer a query exactly."""
    shapes = canonical_shapes(item.target, item.shapes)
    return item.target, shapes, item.dtype, item.direction


def _correlation(a: _Floats, b: _Floats) -> _Floats:
    squared = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)
    return np.exp(-squared / (2 * LENGTH_SCALE**2))


def _fitted(fit: OpFit, flop: float, num_bytes: float) -> float:
    return fit.overhead_s + flop * fit.s_per_flop + num_bytes * fit.s_per_byte
