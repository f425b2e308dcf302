"""Work and memory of attention over a ring (`rings`)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from planner.language.ops.attention_pairs import pairs_met, tile_scratch
from planner.language.ops.call import Call
from planner.language.ops.families.products.attention import ATTENTION
from planner.language.ops.families.products.rings import POSITIONS, RING
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import register


def _flop(call: Call) -> float:
    """Scores that count on the rank that has the most of them, and their products with values."""
    query, key, value = call.inputs[:3]
    low, high, chunk = (call.arg(index, "") for index in (3, 4, 5))
    segments, ranks = call.arg(10, "segments"), call.arg(12, "ranks")
    queries, keys = query[POSITIONS], key[POSITIONS] * ranks
    if segments:
        pairs = pairs_met(queries, keys, low=low, high=high, chunk=chunk, segments=segments)
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
    """A part of keys and values that is attended to, and the next that arrives. Forward: a round's
    result beside the sum so far. Backward: the gradient of the part, and what the rank before has
    sent of it and what is sent on.
    """
    segments, rounds = call.arg(10, "segments"), len(call.arg(11, "rounds"))
    if not segments:
        return 0
    query, key, value = call.op.inputs[:3]
    width = call.element_bytes(query)
    element = max(4, width)
    sent = call.num_bytes(key) + call.num_bytes(value) if rounds > 1 else 0
    low, high = call.arg(3, ""), call.arg(4, "")
    span = None if low is None or high is None else high - low
    tiles = tile_scratch(call, forward=forward, span=span)
    made = call.numel(call.op.outputs[0]) * element
    wide = made if element > width else 0
    if forward:
        return 2 * sent + tiles + made + wide
    of_keys = (call.numel(key) + call.numel(value)) * element
    return 4 * sent + tiles + of_keys + (call.numel(query) * element if wide else 0)


register(
    replace(
        ATTENTION,
        name="attention over a ring",
        targets=(RING,),
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
