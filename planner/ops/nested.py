"""Rules for what a first lowering put in, so that a program can be lowered on a second axis.

A program lowered on tp has redistributions over tp between its local tensors. On another
axis these are ops like any other: they treat every dim alike but those they cut or join.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm

from planner.graph import Op
from planner.layout.placement import OpSharding, Shard, parse_placement
from planner.layout.redistribute import REDISTRIBUTE
from planner.ops.call import Call, P
from planner.ops.letters import by_letters, same_dims
from planner.ops.registry import LocalForm, Placed, local_form, local_ops, rule, strategies


@rule(REDISTRIBUTE)
def redistribute(call: Call) -> Iterator[OpSharding]:
    """Tensor, axis, source, destination, grad_partial: moves data along dims of other axes."""
    places = [parse_placement(str(text)) for text in call.op.args[2:4]]
    yield from same_dims(call, fixed=[p.dim for p in places if isinstance(p, Shard)])
    yield OpSharding(inputs=(P,), outputs=(P,))


@rule(REDISTRIBUTE, contiguous=True)
def redistribute_in_pieces(call: Call) -> Iterator[OpSharding]:
    """A dim that the other axis cuts can be cut finer: each of its n pieces on its own.

    What is k segments in a piece is k times n in the n pieces side by side. So with tp in
    front a rank of cp has a part of every tp piece, and no position leaves it over cp.
    """
    source, target = (parse_placement(str(text)) for text in call.op.args[2:4])
    (before,), (after,) = call.inputs, call.outputs
    if isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim:
        for count in _multiples(lcm(source.segments, target.segments), call.segments):
            place = Shard(source.dim, count)
            yield OpSharding(inputs=(place,), outputs=(place,))
        return
    for cut in (source, target):
        if isinstance(cut, Shard):
            sizes = before[cut.dim], after[cut.dim]
            for count in _multiples(cut.segments, call.segments):
                ends = [Shard(cut.dim, count * size // min(sizes)) for size in sizes]
                yield OpSharding(inputs=(ends[0],), outputs=(ends[1],))


def _multiples(count: int, segments: Sequence[int]) -> list[int]:
    """Return the counts of segments on offer that keep those of a cut apart."""
    return [count, *(more for more in segments if more != count and more % count == 0)]


@rule("planner.vocab_embedding")
def vocab_embedding(call: Call) -> Iterator[OpSharding]:
    """A range of rows [rows, hidden], indices […]: by token; the range is on another axis."""
    tokens = list(range(len(call.inputs[1])))
    yield from by_letters([[None, None], tokens], [[*tokens, None]])


@rule("planner.vocab_log_softmax")
def vocab_log_softmax(call: Call) -> Iterator[OpSharding]:
    """Tensor, the dim that another axis divides: any other."""
    yield from same_dims(call, fixed=[int(call.op.args[1])])  # type: ignore[arg-type]


@rule("planner.with_own_random_stream")
def own_random_stream(call: Call) -> Iterator[OpSharding]:
    """A random op divided on another axis can be divided as ever on this one."""
    inner = _op_inside(call.op)
    yield from strategies(inner, call.tensor, call.axis_size, segments=call.segments)[1:]


@local_form("planner.with_own_random_stream")
def own_random_stream_on_shard(placed: Placed) -> LocalForm:
    """What runs on shards of this axis draws numbers of its own on both."""
    op, call = placed.op, placed.call
    if not isinstance(placed.sharding.outputs[0], Shard):
        return LocalForm((op,))
    form = local_ops(
        _op_inside(op), placed.sharding, call.tensor, axis=placed.axis, axis_size=call.axis_size
    )
    (local,) = form.ops
    return LocalForm((replace(local, kwargs=(*local.kwargs, ("outer_group", op.args[1]))),))


def _op_inside(op: Op) -> Op:
    return replace(op, target=str(op.args[0]), args=op.args[2:])
