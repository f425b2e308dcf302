"""Scaled dot product attention: by batch, by head, or by query position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from planner.language.graph import Op, Ref
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.attention_pairs import pairs_met, tile_scratch
from planner.language.ops.call import Call, LocalForm, Placed, R, Work
from planner.language.ops.families.entries.creation import own_stream
from planner.language.ops.families.products.grouped_heads import heads_of_queries, with_own_keys
from planner.language.ops.families.products.rings import (
    are_mirrored,
    is_on_ring,
    pieces_told,
    plain_on_ring,
    ring_form,
)
from planner.language.ops.flops import arriving_bytes, made_bytes
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.letters import Letters, broadcast, by_letters
from planner.language.ops.plain_attention import (
    backward_scratch,
    forward_scratch,
    is_plain,
    saved_bytes,
)
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.strides import Strides, contiguous_strides, densified_strides


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
        # Equal shares of query heads and key heads keep each query with its own key; a single key
        # head is whole on every rank.
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


def causal_by_query(call: Call) -> Iterator[OpSharding]:
    """With is_causal a rank's queries are at later positions than it counts itself."""
    if call.arg(5, "is_causal", False):
        for count in (1, *call.segments):
            place = Shard(len(call.inputs[0]) - 2, count)
            yield OpSharding(inputs=(place, R, R), outputs=(place,))


def attention_on_shard(placed: Placed) -> LocalForm:
    """A causal mask needs the queries' positions; dropout draws anew on each shard."""
    call = placed.call
    place = placed.sharding.outputs[0]
    if is_on_ring(placed):
        causal, scale = call.arg(5, "is_causal", False), call.arg(6, "scale")
        grouped = bool(call.arg(7, "enable_gqa", False))
        return ring_form(placed, 0 if causal else None, None, None, scale, grouped, None, None)
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
            kwargs=pieces_told(place),
        )
    return own_stream(placed) if dropout > 0 else LocalForm((placed.op,))


# --------------------------------------------------------------------------------- flop, memory


def _flop_of_all_scores(call: Call) -> float:
    """Scores (query x key) and their product with the values."""
    query, key, value = call.inputs[:3]
    scores = prod(query[:-1]) * key[-2]
    return 2.0 * scores * query[-1] + 2.0 * scores * value[-1]


def _flop(call: Call) -> float:
    """The same; a kernel that is told of a causal mask leaves half of the scores out."""
    flop = _flop_of_all_scores(call)
    causal = call.arg(5, "is_causal", False)
    return flop / 2 if causal and not isinstance(causal, Ref) else flop


def _backward(call: Call, forward: Work) -> Work:
    """Scores again, then dV, dP, dQ and dK: 5 products against 2."""
    return Work(
        flop=2.5 * forward.flop,
        read_bytes=forward.num_bytes + arriving_bytes(call),
        write_bytes=made_bytes(call),
    )


def _fused_saved(call: KernelCall) -> Saved:
    """Fused attention saves query, key, value, output and the log-sum-exp of each row.

    A boolean mask becomes an additive one, which is saved besides.
    """
    if is_plain(call):
        return Saved(extra_bytes=saved_bytes(call))
    query, key, value = call.op.inputs[:3]
    dtype_bytes = call.element_bytes(query)
    rows = prod(call.shape(query)[:-1])
    # The log-sum-exp of each row, in fp32 or wider.
    extra = rows * max(4, dtype_bytes)
    tensors = [query, key, value, call.op.outputs[0]]
    for mask in call.op.inputs[3:4]:
        if call.tensor[mask].dtype == "bool":
            extra += call.numel(mask) * dtype_bytes
        else:
            tensors.append(mask)
    return Saved(tensors=tuple(tensors), extra_bytes=extra)


def _flop_of_causal_shard(call: Call) -> float:
    """Scores that count, on the rank that has the most of them; all where weights are dropped,
    as a mask is made then.
    """
    if call.arg(3, "dropout_p", 0.0):
        return _flop_of_all_scores(call)
    query, key = call.inputs[:2]
    told = {"segments": call.arg(6, "segments", 1), "mirrored": are_mirrored(call)}
    pairs = pairs_met(query[-2], key[-2], low=0, high=None, **told)
    return _flop_of_all_scores(call) * pairs / (query[-2] * key[-2])


def _causal_saved(call: KernelCall) -> Saved:
    """Fused attention of some queries to all keys. Where weights are dropped, the mask of positions
    is made, and made additive.
    """
    if not call.arg(3, "dropout_p", 0.0):
        return _fused_saved(call)
    query, key = call.op.inputs[:2]
    # One for all samples and heads.
    mask = call.shape(query)[-2] * call.shape(key)[-2]
    saved = _fused_saved(call)
    return replace(saved, extra_bytes=saved.extra_bytes + mask * call.element_bytes(query))


def _scratch(call: KernelCall, *, forward: bool) -> int:
    if not is_plain(call):
        return 0
    return forward_scratch(call) if forward else backward_scratch(call)


def _causal_scratch(call: KernelCall, *, forward: bool) -> int:
    if call.arg(3, "dropout_p", 0.0):
        return 0
    return tile_scratch(call, forward=forward, segments=call.arg(6, "segments", 1))


def _like_query(call: KernelCall, output: str) -> Strides:
    """Fused kernels allocate the output like the query: its order of dims, without gaps."""
    shape = call.shape(output)
    if is_plain(call):
        return contiguous_strides(shape)
    return densified_strides(shape, call.strides[call.op.inputs[0]])


def _drops(op: Op) -> bool:
    probability = op.args[4] if len(op.args) > 4 else dict(op.kwargs).get("dropout_p", 0.0)
    return bool(probability)


# ---------------------------------------------------------------------------------------- records

ATTENTION = register(
    OpFamily(
        name="attention",
        targets=aten("scaled_dot_product_attention"),
        shard=(
            ShardRule(attention),
            ShardRule(heads_of_queries, contiguous=True),
            ShardRule(causal_by_query, contiguous=True, together=True),
            ShardRule(plain_on_ring, contiguous=True, together=True, asked=True),
        ),
        local_form=lambda placed: with_own_keys(placed, attention_on_shard),
        worth_moving=True,
        arithmetic="attention",
        flop=_flop,
        backward=_backward,
        result=_like_query,
        saved=_fused_saved,
        scratch=_scratch,
        recomputed=False,
        random=_drops,
    )
)
register(
    replace(
        ATTENTION,
        name="attention of a shard of queries",
        targets=("planner.causal_attention",),
        shard=(),
        local_form=None,
        flop=_flop_of_causal_shard,
        saved=_causal_saved,
        scratch=_causal_scratch,
        random=lambda op: bool(op.args[3]),
    )
)
register(
    OpFamily(
        name="attention kernels",
        targets=aten("_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"),
        worth_moving=True,
        arithmetic="attention",
        flop=_flop,
        backward=_backward,
        recomputed=False,
    )
)
