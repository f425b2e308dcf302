"""Scaled dot product attention: by batch, by head, or by query position."""

from __future__ import annotations

from collections.abc import Iterator

from planner.graph import Ref
from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, R
from planner.ops.families.creation import own_stream
from planner.ops.letters import Letters, broadcast, by_letters
from planner.ops.registry import LocalForm, Placed, local_form, rule


@rule("aten.scaled_dot_product_attention")
def attention(call: Call) -> Iterator[OpSharding]:
    """Queries [b, h, q, d], keys [b, h, k, d], values [b, h, k, e], mask over [b, h, q, k].

    With grouped queries k and v have fewer heads; equal contiguous shares of both keep
    each query head with its own key head. Queries can be divided too: keys and values are
    then gathered (context parallelism); `causal_by_query` does it where positions count.
    """
    rank = len(call.inputs[0])
    batch = list(range(rank - 2))
    grouped = bool(call.arg(7, "enable_gqa", False))
    query, key, value = call.inputs[:3]
    names: list[list[int | None]]
    if grouped:  # one key head is every query head's own
        of_keys = [*batch[:-1], None if key[-3] == 1 else batch[-1]]
        names = [[*batch], of_keys, [*of_keys]]
    else:  # batch and head dims broadcast as in a product
        names = [broadcast(s[:-2], call.outputs[0][:-2]) for s in (query, key, value)]
    positions = None if call.arg(5, "is_causal", False) else "q"
    letters: list[Letters] = [
        [*names[0], positions, None],
        [*names[1], None, None],
        [*names[2], None, None],
    ]
    if isinstance(call.arg(3, "attn_mask"), Ref):
        scores = (*call.outputs[0][:-1], key[-2])
        aligned = broadcast(call.inputs[3], scores)
        all_letters = [*batch, positions, None]
        letters.append([None if i is None else all_letters[i] for i in aligned])
    yield from by_letters(letters, [[*batch, positions, None]])


@rule("aten.scaled_dot_product_attention", contiguous=True, together=True)
def causal_by_query(call: Call) -> Iterator[OpSharding]:
    """With is_causal a rank's queries are at later positions than it counts itself."""
    if call.arg(5, "is_causal", False):
        for count in (1, *call.segments):
            place = Shard(len(call.inputs[0]) - 2, count)
            yield OpSharding(inputs=(place, R, R), outputs=(place,))


@local_form("aten.scaled_dot_product_attention")
def attention_on_shard(placed: Placed) -> LocalForm:
    """A causal mask asks for the queries' positions; dropout draws anew on each shard."""
    call = placed.call
    place = placed.sharding.outputs[0]
    dropout = float(call.arg(4, "dropout_p", 0.0))
    by_query = isinstance(place, Shard) and place.dim == len(call.inputs[0]) - 2
    if call.arg(5, "is_causal", False) and isinstance(place, Shard) and by_query:
        return placed.with_args(
            *placed.op.args[:3],
            dropout,
            call.arg(6, "scale"),
            bool(call.arg(7, "enable_gqa", False)),
            place.segments,
            placed.axis,
            target="planner.causal_attention",
        )
    return own_stream(placed) if dropout > 0 else LocalForm((placed.op,))
