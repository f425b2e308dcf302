"""Attention that is told which pairs of positions count: how many there are, and what tiles take.

A query at position p meets a key at position k where low <= p - k <= high, and where both are in
the same run of `chunk` positions. (0, None) is causal, (0, w - 1) a causal window of w.
"""

from __future__ import annotations

from math import prod

from planner.ops.kernel import KernelCall

TILE = 512
"""Queries and keys of a tile of scores, at most, where no fused kernel computes attention."""


def pairs_met(
    queries: int,
    keys: int,
    *,
    low: int | None,
    high: int | None,
    chunk: int | None = None,
    segments: int = 1,
) -> float:
    """Return how many pairs the rank computes that has the most of them.

    `queries` are a rank's, a piece of each of `segments` equal parts of the `keys`' positions.
    """
    ranks = max(1, keys // queries)
    if chunk is not None:
        # Each run is a sequence of its own; ranks share them.
        low, high = _closer(low, high, chunk - 1)
        runs, rest = divmod(keys, chunk)
        total = runs * _pairs(0, chunk, chunk, low, high) + _pairs(0, rest, rest, low, high)
        return total / ranks
    piece = queries // segments
    return float(
        max(
            sum(
                _pairs((segment * ranks + rank) * piece, piece, keys, low, high)
                for segment in range(segments)
            )
            for rank in {0, ranks // 2, ranks - 1}
        )
    )


def _closer(low: int | None, high: int | None, most: int) -> tuple[int, int]:
    return (-most if low is None else max(low, -most)), (most if high is None else min(high, most))


def _pairs(first: int, queries: int, keys: int, low: int | None, high: int | None) -> int:
    """Return the pairs of queries from a first position on."""
    upper = queries * keys if high is None else _at_most(high - first, queries, keys)
    lower = 0 if low is None else _at_most(low - 1 - first, queries, keys)
    return max(0, upper - lower)


def _at_most(ahead: int, queries: int, keys: int) -> int:
    """Return the pairs whose query is, counted from its first, at most so far ahead of the key."""
    whole = max(0, min(queries, ahead + 1))  # these meet every key
    least, most = max(1, -ahead), min(queries - 1 - ahead, keys - 1)
    # A query that is `gap` beyond that meets keys - gap of them.
    gaps = max(0, most - least + 1)
    return whole * keys + gaps * keys - gaps * (least + most) // 2


def runs_by_tiles(call: KernelCall) -> bool:
    """Whether no fused kernel computes it: on the CPU, and in single and double precision."""
    return call.device_type == "cpu" or call.element_bytes(call.op.inputs[0]) > 2


def tile_scratch(call: KernelCall, *, forward: bool) -> int:
    """Bytes of one tile of scores and of the rows beside it; in backward of two tiles, and of the
    sums of gradients where those are wider than the gradients.
    """
    if not runs_by_tiles(call):
        return 0
    query, key, value = (call.shape(name) for name in call.op.inputs[:3])
    width = call.element_bytes(call.op.inputs[0])
    element = max(4, width)
    rows = prod(query[:-2]) * min(TILE, query[-2])
    columns = min(TILE, key[-2])
    tile = element * rows * columns
    if forward:
        return tile + element * rows * (query[-1] + 3 * value[-1])
    wider = element * sum(map(prod, (key, value))) if element > width else 0
    return 2 * tile + element * rows * (3 * query[-1] + 2 * value[-1]) + wider
