"""Attention that is told of its mask in a few numbers: windows, runs of positions, documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod

from planner.language.graph import Ref
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.attention_pairs import (
    keys_of_tile,
    pairs_met,
    runs_by_tiles,
    tile_scratch,
)
from planner.language.ops.call import Call, LocalForm, Placed, R
from planner.language.ops.families.products.attention import ATTENTION
from planner.language.ops.families.products.grouped_heads import heads_of_queries, with_own_keys
from planner.language.ops.families.products.rings import (
    are_mirrored,
    is_on_ring,
    masked_on_ring,
    pieces_told,
    ring_form,
)
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.letters import Letters, by_letters
from planner.language.ops.record import ShardRule, register

MASKED = "planner.masked_attention"
"""Args (query, key, value, the least and the most by which a query's position is ahead of a key's,
positions of a run in which both are, scale, whether heads of keys are grouped, a table with one
number for positions that meet, a table of the keys that count). Tables are [batch, positions]; None
is what bounds nothing.
"""

MASKED_SHARD = "planner.masked_attention_of_queries"
"""The same for some of the queries; further args (segments, axis), keyword `mirrored`."""

GROUPED_ARGUMENT = 7
"""Where both are told whether each head of keys is that of several heads of queries."""

_BLOCK = 128
"""Queries and keys of a block of the masks that `flex_attention` takes."""


def by_head(call: Call) -> Iterator[OpSharding]:
    """Yield shards of samples, and of heads with their own keys."""
    query, key = call.inputs[:2]
    heads = 1 if key[1] > 1 or query[1] == 1 else None  # one head of keys is all queries' own
    letters: list[Letters] = [[0, 1, None, None], [0, heads, None, None], [0, heads, None, None]]
    letters += [[0, None]] * (len(call.inputs) - 3)
    yield from by_letters(letters, [[0, 1, None, None]])


def by_query(call: Call) -> Iterator[OpSharding]:
    """Yield shards of queries, which are at later positions than a rank counts itself."""
    for count in (1, *call.segments):
        place = Shard(2, count)
        whole = (R,) * (len(call.inputs) - 1)
        yield OpSharding(inputs=(place, *whole), outputs=(place,))


def on_shard(placed: Placed) -> LocalForm:
    """A shard of queries takes its positions from its rank."""
    if is_on_ring(placed):
        return ring_form(placed, *placed.op.args[3:10])
    place = placed.sharding.outputs[0]
    if not isinstance(place, Shard) or place.dim != 2:
        return LocalForm((placed.op,))
    args = (*placed.op.args, place.segments, placed.axis)
    return placed.with_args(*args, target=MASKED_SHARD, kwargs=pieces_told(place))


def _flop(call: Call) -> float:
    """Scores of the pairs within bounds, and their products with values; of documents nothing is
    known but that: they are priced as if each sequence had only one.
    """
    query, key, value = call.inputs[:3]
    low, high, chunk = (call.arg(index, "") for index in (3, 4, 5))
    told = {"segments": call.arg(10, "segments", 1), "mirrored": are_mirrored(call)}
    pairs = pairs_met(query[-2], key[-2], low=low, high=high, chunk=chunk, **told)
    return 2.0 * prod(query[:-2]) * pairs * (query[-1] + value[-1])


def _saved(call: KernelCall) -> Saved:
    """Query, key, value, output, tables, and the log-sum-exp of each row; on a GPU which blocks of
    pairs to compute: their indices by query and by key, of those that count in part and in whole.
    """
    query, key = (call.shape(name) for name in call.op.inputs[:2])
    extra = prod(query[:-1]) * max(4, call.element_bytes(call.op.inputs[0]))
    if not runs_by_tiles(call):
        samples = query[0] if any(isinstance(arg, Ref) for arg in call.op.args[8:10]) else 1
        # int32 indices, in four lists.
        extra += 4 * 4 * samples * ceil(query[-2] / _BLOCK) * ceil(key[-2] / _BLOCK)
    return Saved(tensors=(*call.op.inputs, call.op.outputs[0]), extra_bytes=extra)


def _scratch(call: KernelCall, *, forward: bool) -> int:
    segments = call.arg(10, "segments", 1)
    keys = keys_of_tile(call, segments)
    return tile_scratch(call, forward=forward, segments=segments, keys=keys)


register(
    replace(
        ATTENTION,
        name="attention told of its mask",
        targets=(MASKED,),
        shard=(
            ShardRule(by_head),
            ShardRule(heads_of_queries, contiguous=True),
            ShardRule(by_query, contiguous=True, together=True),
            ShardRule(masked_on_ring, contiguous=True, together=True, asked=True),
        ),
        local_form=lambda placed: with_own_keys(placed, on_shard),
        flop=_flop,
        saved=_saved,
        scratch=_scratch,
        random=False,
    )
)
register(
    replace(
        ATTENTION,
        name="attention told of its mask, of a shard of queries",
        targets=(MASKED_SHARD,),
        shard=(),
        local_form=None,
        flop=_flop,
        saved=_saved,
        scratch=_scratch,
        random=False,
    )
)
