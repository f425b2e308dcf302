"""Fits with non-negative coefficients for least relative error, and their residuals.

Both fits are linear in their coefficients, so each is a non-negative least squares problem
with rows divided by the measured time; a few reweighting passes turn squared into absolute
residuals, so one disturbed sample does not bend the line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from profiles.lookup.families import BLOCK, family_of
from profiles.records import CollectiveFit, CollectiveRecord, Direction, OpFit, OpRecord, Piece

MAX_PIECES = 4
MIN_POINTS_PER_PIECE = 3
MIN_SAMPLES_PER_TARGET = 3
_REWEIGHTINGS = 8

_Floats = NDArray[np.float64]


def fit_nonnegative(terms: _Floats, seconds: _Floats) -> tuple[_Floats, _Floats]:
    """Fit seconds (n,) by terms (n, k) @ coefficients >= 0 for least absolute relative error.

    Returns the coefficients (k,) and the signed relative residuals (n,).
    """
    from scipy.optimize import nnls

    relative = terms / seconds[:, None]
    # Columns of like magnitude: nnls works in absolute tolerances.
    scale = np.where(relative.any(axis=0), np.abs(relative).max(axis=0), 1.0)
    weight = np.ones(len(seconds))
    coefficients = np.zeros(terms.shape[1])
    for _ in range(_REWEIGHTINGS):
        # Rows were divided by their times, so the right side is 1, times the row's weight.
        coefficients, _norm = nnls(relative / scale * weight[:, None], weight)
        residual = relative / scale @ coefficients - 1
        # A square over |residual| is |residual|. The floor bounds the weight of samples that the
        # line meets.
        weight = 1 / np.sqrt(np.maximum(np.abs(residual), 1e-2))
    return coefficients / scale, residual


def fit_ops(records: Sequence[OpRecord]) -> tuple[OpFit, ...]:
    """Fit one line per family, and per target with enough samples, dtype and direction."""
    groups: dict[tuple[str, str, Direction], list[OpRecord]] = defaultdict(list)
    for record in records:
        if family_of(record.target) == BLOCK:
            continue
        for name in (family_of(record.target), record.target):
            groups[name, record.dtype, record.direction].append(record)
    fits = []
    for (name, dtype, direction), group in sorted(groups.items()):
        if "." in name and len(group) < MIN_SAMPLES_PER_TARGET:
            continue
        terms = np.array([[1.0, r.flop, r.num_bytes] for r in group])
        coefficients, residual = fit_nonnegative(terms, np.array([r.seconds for r in group]))
        fits.append(
            OpFit(
                family=name,
                dtype=dtype,
                direction=direction,
                overhead_s=coefficients[0],
                s_per_flop=coefficients[1],
                s_per_byte=coefficients[2],
                relative_error=float(np.median(np.abs(residual))),
                num_samples=len(group),
                origin="measured",
                detail=f"fit to {len(group)} records of ops.csv",
            )
        )
    return tuple(fits)


def fit_pieces(num_bytes: _Floats, seconds: _Floats) -> tuple[tuple[Piece, ...], float]:
    """Fit seconds by pieces in the size, its root and a constant; sizes must rise.

    The breakpoints are chosen by dynamic programming, for the least sum of absolute relative
    residuals plus a price per piece: exactly, but where `MAX_PIECES` binds, which no state counts.
    Returns pieces and the median residual.
    """
    count = len(num_bytes)
    lines: dict[tuple[int, int], tuple[_Floats, float]] = {}
    for start in range(count):
        for stop in range(start + 1, count + 1):
            # However few the sizes are, all of them may be a single piece.
            if stop - start < MIN_POINTS_PER_PIECE and (start, stop) != (0, count):
                continue
            n = num_bytes[start:stop]
            terms = np.stack([np.ones(stop - start), np.sqrt(n), n], axis=1)
            line, residual = fit_nonnegative(terms, seconds[start:stop])
            lines[start, stop] = line, float(np.abs(residual).sum())
    # A piece must earn its coefficients: at least this much total residual.
    price = 0.05 * MIN_POINTS_PER_PIECE
    # best[i]: the least price of the first i sizes, and where the pieces of that begin and end.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
    for stop in range(1, count + 1):
        options = [
            (best[start][0] + lines[start, stop][1] + price, (*best[start][1], stop))
            for start in range(stop)
            if (start, stop) in lines and len(best[start][1]) <= MAX_PIECES
        ]
        best.append(min(options, default=(np.inf, (0,))))
    cuts = best[count][1]
    pieces = tuple(
        Piece(
            min_bytes=0.0 if start == 0 else float(num_bytes[start]),
            alpha_s=lines[start, stop][0][0],
            gamma_s_per_sqrt_byte=lines[start, stop][0][1],
            beta_s_per_byte=lines[start, stop][0][2],
        )
        for start, stop in pairwise(cuts)
    )
    predicted = np.array([piecewise_at(pieces, n) for n in num_bytes])
    return pieces, float(np.median(np.abs(predicted / seconds - 1)))


def piecewise_at(pieces: Sequence[Piece], num_bytes: float) -> float:
    """Return the time of a message under a piecewise fit; larger is never cheaper."""
    index = max((i for i, p in enumerate(pieces) if p.min_bytes <= num_bytes), default=0)
    piece = pieces[index]
    return max(levels_of(pieces)[index], piece.seconds(num_bytes))


def levels_of(pieces: Sequence[Piece]) -> tuple[float, ...]:
    """Return, per piece, the time that the pieces before it have reached.

    At a breakpoint the fitted line may step down; the time then stays level instead.
    """
    levels = [0.0]
    for piece, after in pairwise(pieces):
        levels.append(max(levels[-1], piece.seconds(after.min_bytes)))
    return tuple(levels)


def rising(seconds: _Floats) -> _Floats:
    """Return the nearest non-decreasing sequence in log time (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in np.log(seconds):
        mean, count = float(value), 1
        # A pool above the next value violates the order: they merge at their weighted mean.
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return np.exp(np.concatenate([np.full(count, mean) for mean, count in pools]))


def fit_collectives(records: Sequence[CollectiveRecord]) -> tuple[CollectiveFit, ...]:
    """Fit one piecewise line per kind and group shape."""
    groups: dict[tuple, list[CollectiveRecord]] = defaultdict(list)
    for record in records:
        groups[record.kind, record.ranks_per_node, record.num_nodes].append(record)
    fits = []
    for (kind, ranks_per_node, num_nodes), group in sorted(groups.items()):
        group.sort(key=lambda r: r.num_bytes)
        pieces, error = fit_pieces(
            np.array([float(r.num_bytes) for r in group]),
            np.array([r.seconds for r in group]),
        )
        fits.append(
            CollectiveFit(
                kind=kind,
                ranks_per_node=ranks_per_node,
                num_nodes=num_nodes,
                pieces=pieces,
                relative_error=error,
                num_samples=len(group),
                origin="measured",
                detail=f"fit to {len(group)} records of collectives.csv",
            )
        )
    return tuple(fits)
