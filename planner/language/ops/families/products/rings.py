"""Attention whose keys and values go round a ring of ranks (Liu et al. 2023, arXiv 2310.01889).

Queries, keys and values all stay cut by position. In each round a rank attends to the part of the
keys and values that it has at hand, while that part is on its way to the next rank; what rounds
give is put together by their sums of exponentials. Rounds in which no rank meets a key are left
out. `planner.runtime.stage.calls.ring_attention` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.graph import Arg, Ref
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.attention_pairs import rounds_met
from planner.language.ops.call import Call, LocalForm, Placed, R

RING = "planner.ring_attention"
"""Args (query, key, value, the least and the most by which a query's position is ahead of a key's,
positions of a run in which both are, scale, whether heads of keys are grouped, a table with one
number for positions that meet, a table of the keys that count, segments, rounds, ranks, axis). The
first ten are those of `masked_attention.MASKED`; rounds are by how many ranks the keys of each lie
behind. Segments are 0 where a runtime of others deals positions so that each rank meets as many
keys, whatever a plan says. Keyword `mirrored` (`pieces_told`).
"""

POSITIONS = 2
"""The dim of queries, keys and values that is cut, of [batch, heads, positions, width]."""

_HALVES = ("bfloat16", "float16")


def plain_on_ring(call: Call) -> Iterator[OpSharding]:
    """Queries, keys and values cut by position: attention of a sequence to itself, causal or in
    both directions. Without dropout, which would have to draw alike in each round's backward.
    """
    mask, causal = call.arg(3, "attn_mask"), call.arg(5, "is_causal", False)
    if mask is None and not isinstance(causal, Ref) and not call.arg(4, "dropout_p", 0.0):
        yield from _cut_by_position(call)


def masked_on_ring(call: Call) -> Iterator[OpSharding]:
    """The same of attention that is told of its mask. In half precision it is not offered: kernels
    that give sums of exponentials besides take no windows and no tables.
    """
    if call.tensor[call.op.inputs[0]].dtype not in _HALVES:
        yield from _cut_by_position(call)


def is_on_ring(placed: Placed) -> bool:
    """Whether keys are cut by position, as queries are."""
    key = placed.sharding.inputs[1]
    return isinstance(key, Shard) and key.dim == len(placed.call.inputs[1]) - 2


def ring_form(placed: Placed, *sight: Arg) -> LocalForm:
    """Return attention over a ring; `sight` is what `RING` takes from the least distance to the
    table of keys.
    """
    place, call = placed.sharding.inputs[0], placed.call
    assert isinstance(place, Shard)
    low, high, chunk = (None if part is None else int(part) for part in sight[:3])  # type: ignore[arg-type]
    piece = call.inputs[0][POSITIONS] // (call.axis_size * place.segments)
    told = {"segments": place.segments, "mirrored": place.mirrored}
    # Where no query meets a key at all the result is 0, which a round of a rank's own keys yields.
    rounds = rounds_met(piece, ranks=call.axis_size, low=low, high=high, chunk=chunk, **told) or (
        0,
    )
    args = (*placed.op.args[:3], *sight, place.segments, rounds, call.axis_size, placed.axis)
    return placed.with_args(*args, target=RING, kwargs=pieces_told(place))


def pieces_told(place: Shard) -> tuple[tuple[str, Arg], ...]:
    """Return what an op that counts positions is told of its queries' pieces beside how many
    segments they are of: whether these are mirrored, where they are.
    """
    return (("mirrored", True),) if place.mirrored else ()


def are_mirrored(call: Call) -> bool:
    """Whether an op was told so."""
    return bool(dict(call.op.kwargs).get("mirrored", False))


def _cut_by_position(call: Call) -> Iterator[OpSharding]:
    query, key, value = call.inputs[:3]
    if len({len(query), len(key), len(value), 4}) > 1 or query[0] != key[0]:
        return
    if query[POSITIONS] != key[POSITIONS] or query[1] % key[1] or key[1] != value[1]:
        return
    is_half = call.tensor[call.op.inputs[0]].dtype in _HALVES
    if is_half and query[-1] != value[-1]:  # nor do those kernels take values of another width
        return
    for count in (1, *call.segments):
        place = Shard(POSITIONS, count)
        tables = (R,) * (len(call.inputs) - 3)
        yield OpSharding(inputs=(place, place, place, *tables), outputs=(place,))
