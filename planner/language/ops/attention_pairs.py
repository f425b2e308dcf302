"""Attention that is told which pairs of positions count: how many there are, and what tiles take.

A query at position p meets a key at position k where low <= p - k <= high, and where both are in
the same run of `chunk` positions. (0, None) is causal, (0, w - 1) a causal window of w.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from planner.language.layout.placement import piece_in
from planner.language.ops.kernel import KernelCall

TILE = 512
"""Queries and keys of a tile of scores, at most, where no fused kernel computes attention."""


@lru_cache(maxsize=1024)
def pairs_met(
    queries: int,
    keys: int,
    *,
    low: int | None,
    high: int | None,
    chunk: int | None = None,
    segments: int = 1,
    mirrored: bool = False,
) -> float:
    """Return how many pairs the rank computes that has the most of them.

    `queries` are a rank's, a piece of each of `segments` equal parts of the `keys`' positions, with
    `mirrored` parts or without (`Shard`).
    """
    ranks = max(1, keys // queries)
    if chunk is not None:
        # Each run is a sequence of its own; ranks share them.
        low, high = _closer(low, high, chunk - 1)
        # The last run may be shorter.
        runs, rest = divmod(keys, chunk)
        total = runs * _pairs(0, chunk, chunk, low, high) + _pairs(0, rest, rest, low, high)
        return total / ranks
    piece = queries // segments
    return float(
        max(
            sum(
                _pairs((segment * ranks + own) * piece, piece, keys, low, high)
                for segment in range(segments)
                for own in (piece_in(segment, rank, ranks, mirrored=mirrored),)
            )
            for rank in range(ranks)
        )
    )


def keys_met(
    first: int,
    queries: int,
    keys: int,
    *,
    low: int | None,
    high: int | None,
    chunk: int | None = None,
) -> tuple[int, int]:
    """Return where the keys begin and end that any of so many queries from a position on meets."""
    # low <= q - k <= high: from the key that the first query meets with `high` to that of the last
    # query with `low`.
    begin = 0 if high is None else max(0, first - high)
    end = keys if low is None else min(keys, first + queries - low)
    if chunk is not None:
        begin = max(begin, first // chunk * chunk)
        end = min(end, ((first + queries - 1) // chunk + 1) * chunk)
    return begin, end


@lru_cache(maxsize=1024)
def rounds_met(
    piece: int,
    *,
    ranks: int,
    segments: int,
    low: int | None,
    high: int | None,
    chunk: int | None = None,
    mirrored: bool = False,
) -> tuple[int, ...]:
    """Return by how many ranks those lie behind a rank whose keys it meets, on any rank.

    A rank has a piece of so many positions of each of `segments` parts of a sequence. 0 is the rank
    itself; with a causal window of less than a piece and one segment 0 and 1 are met, in `mirrored`
    segments those of the next rank, too.
    """
    pieces = segments * ranks

    def owner(number: int) -> int:
        segment, at = divmod(number, ranks)
        return piece_in(segment, at, ranks, mirrored=mirrored)

    found: set[int] = set()
    for own in range(pieces):
        begin, end = keys_met(own * piece, piece, pieces * piece, low=low, high=high, chunk=chunk)
        others = range(begin // piece, -(-end // piece))
        found.update((owner(own) - owner(other)) % ranks for other in others)
        if len(found) == ranks:
            break
    return tuple(sorted(found))


def _closer(low: int | None, high: int | None, most: int) -> tuple[int, int]:
    return (-most if low is None else max(low, -most)), (most if high is None else min(high, most))


def _pairs(first: int, queries: int, keys: int, low: int | None, high: int | None) -> int:
    """Return the pairs of queries from a first position on."""
    # Pairs with low <= p - k <= high are those up to `high` less those up to low - 1.
    upper = queries * keys if high is None else _at_most(high - first, queries, keys)
    lower = 0 if low is None else _at_most(low - 1 - first, queries, keys)
    return max(0, upper - lower)


def _at_most(ahead: int, queries: int, keys: int) -> int:
    """Return the pairs whose query is, counted from its first, at most so far ahead of the key."""
    whole = max(0, min(queries, ahead + 1))  # these meet every key
    # Query ahead + gap meets the keys from `gap` on: keys - gap of them. Summed over the gaps from
    # `least` to `most`, an arithmetic series.
    least, most = max(1, -ahead), min(queries - 1 - ahead, keys - 1)
    # A query that is `gap` beyond that meets keys - gap of them.
    gaps = max(0, most - least + 1)
    return whole * keys + gaps * keys - gaps * (least + most) // 2


def runs_by_tiles(call: KernelCall) -> bool:
    """Whether no fused kernel computes it: on the CPU, and in single and double precision."""
    return call.device_type == "cpu" or call.element_bytes(call.op.inputs[0]) > 2


def tile_scratch(
    call: KernelCall, *, forward: bool, segments: int = 1, keys: int | None = None
) -> int:
    """Bytes of a tile of scores and of the rows beside it, where tiles compute it. Queries are
    pieces of so many segments, and a tile is of one; its keys are at most so many.

    Forward: weights times values, copied for the product, is added to the sums so far, faded, of
    which there are four at once, and five numbers a row. Backward: two tiles; the gradient of the
    rows so far, and what a tile adds to it by a copy of its keys; one number a row. Rows of several
    heads of one key are copies, as are those in half precision, whose gradients are summed wider.
    """
    if not runs_by_tiles(call):
        return 0
    query, key, value = (call.shape(name) for name in call.op.inputs[:3])
    width = call.element_bytes(call.op.inputs[0])
    element = max(4, width)
    length = min(TILE, query[-2] // segments)
    rows, columns = prod(query[:-2]) * length, min(TILE, key[-2])
    columns = columns if keys is None else min(columns, keys)
    tile, key_rows = rows * columns, prod(key[:-2]) * columns
    is_copied = key[1] != query[1] or element > width
    if forward:
        copied = rows * query[-1] if is_copied else 0
        sums = rows * (3 * value[-1] + 5) + max(rows, key_rows) * value[-1]
        return element * (tile + sums + copied)
    copied = rows * (query[-1] + value[-1]) if is_copied else 0
    wider = prod(key) + prod(value) if element > width else 0
    return element * (2 * tile + rows * (2 * query[-1] + 1) + key_rows * key[-1] + copied + wider)


def keys_of_tile(call: KernelCall, segments: int) -> int | None:
    """Return how many keys a tile of queries of a piece meets within its bounds (args 3 and 4: the
    least and the most by which a query is ahead); None where they bound nothing.
    """
    low, high = call.arg(3, ""), call.arg(4, "")
    if low is None or high is None:
        return None
    length = min(TILE, call.shape(call.op.inputs[0])[-2] // segments)
    return int(length + high - low)
