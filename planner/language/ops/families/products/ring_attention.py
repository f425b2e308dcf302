"""Work and memory of attention over a ring (`rings`)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from planner.language.ops.attention_pairs import (
    keys_of_tile,
    pairs_met,
    runs_by_tiles,
    tile_scratch,
)
from planner.language.ops.call import Call
from planner.language.ops.families.products.attention import ATTENTION
from planner.language.ops.families.products.rings import POSITIONS, RING, are_mirrored
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import register


def _flop(call: Call) -> float:
    """Scores that count on the rank that has the most of them, and their products with values."""
    query, key, value = call.inputs[:3]
    low, high, chunk = (call.arg(index, "") for index in (3, 4, 5))
    segments, ranks = call.arg(10, "segments"), call.arg(12, "ranks")
    queries, keys = query[POSITIONS], key[POSITIONS] * ranks
    if segments:
        told = {"segments": segments, "mirrored": are_mirrored(call)}
        pairs = pairs_met(queries, keys, low=low, high=high, chunk=chunk, **told)
    else:  # causal, dealt evenly: half of all
        pairs = queries * keys / 2
    return 2.0 * prod(query[:-2]) * pairs * (query[-1] + value[-1])


def _rounds(call: Call) -> int:
    """Each round is a kernel of its own, of a part of the keys; dealt evenly as a single one, since
    rates of other runtimes are of whole steps.
    """
    return len(call.arg(11, "rounds")) if call.arg(10, "segments") else 1


def _kernels(call: Call) -> tuple[int, int]:
    """In each round a kernel for each piece of the queries, and between rounds three that put two
    results together, or that add up gradients.
    """
    segments, rounds = call.arg(10, "segments"), len(call.arg(11, "rounds"))
    launched = rounds * segments + 3 * (rounds - 1) if segments else 1
    return launched, launched


def _reads(call: Call) -> float:
    """In each round queries and a part of the keys and values; the result so far but in the first
    round.
    """
    query, key, value = (call.num_bytes(name) for name in call.op.inputs[:3])
    rounds = _rounds(call)
    return float(rounds * (query + key + value) + (rounds - 1) * 2 * query)


def _saved(call: KernelCall) -> Saved:
    """Query, key, value, output, tables, and the log-sum-exp of each row, in fp32 or wider."""
    query = call.op.inputs[0]
    extra = prod(call.shape(query)[:-1]) * max(4, call.element_bytes(query))
    return Saved(tensors=(*call.op.inputs, call.op.outputs[0]), extra_bytes=extra)


def _scratch(call: KernelCall, *, forward: bool) -> int:
    """What is there beside queries, keys, values and the result.

    With s bytes of a rank's keys and values, and o of its result,

    forward     2 s     what is attended to, and what arrives
                o       of a round, beside the sum so far
    backward    2 s     in the first round the same
                4 s     in later rounds the gradients of the part before besides, sent on and
                        arriving; 3 s in the last of two, when nothing else arrives

    and a tile. In half precision the sum so far and all gradients at hand are in fp32.
    """
    segments, rounds = call.arg(10, "segments"), len(call.arg(11, "rounds"))
    if not segments:
        return 0
    query, key, value = call.op.inputs[:3]
    element = max(4, call.element_bytes(query))
    is_half, by_tiles = call.element_bytes(query) < element, runs_by_tiles(call)
    sent = (call.num_bytes(key) + call.num_bytes(value)) * (rounds > 1)
    # A rank's own keys begin where its queries do; others lie behind, as far as bounds reach.
    own, piece = keys_of_tile(call, segments), call.shape(key)[POSITIONS] // segments
    behind = None if own is None else call.arg(4, "") - call.arg(3, "")
    tiles, tiles_behind = (
        tile_scratch(
            call,
            forward=forward,
            segments=segments,
            keys=piece if keys is None else min(keys, piece),
        )
        for keys in (own, behind)
    )
    if forward:
        result = call.numel(call.op.outputs[0]) * element
        rows = prod(call.shape(query)[:-1]) * element
        wide = result + (0 if by_tiles else call.num_bytes(call.op.outputs[0]))
        return 2 * sent + tiles + result + rows + is_half * wide
    # (Of tiles in half precision the gradients of keys in fp32 are counted with them.)
    wide = is_half * element * (call.numel(key) + call.numel(value))
    summed = is_half * (call.numel(query) * element - call.num_bytes(query))
    if not by_tiles:
        grads = wide + call.num_bytes(query) + call.num_bytes(key) + call.num_bytes(value)
        tiles = tiles_behind = grads
    later = 3 * sent + tiles_behind if rounds == 2 else 4 * sent + tiles_behind
    return summed + max(2 * sent + tiles, later, 4 * sent + wide)


register(
    replace(
        ATTENTION,
        name="attention over a ring",
        targets=(RING,),
        eager="its messages run beside its kernels",
        shard=(),
        local_form=None,
        flop=_flop,
        reads=_reads,
        rounds=_rounds,
        kernels=_kernels,
        saved=_saved,
        scratch=_scratch,
        random=False,
    )
)
