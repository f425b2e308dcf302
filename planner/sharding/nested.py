"""Rules for what a first lowering put in, so that a program can be lowered on a second axis.

A program lowered on tp has redistributions over tp between its local tensors. On another
axis these are ops like any other: they treat every dim alike but those they cut or join.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.placement import OpSharding, Shard, parse_placement
from planner.sharding.call import Call, P
from planner.sharding.letters import by_letters, same_dims
from planner.sharding.registry import rule


@rule("planner.redistribute")
def redistribute(call: Call) -> Iterator[OpSharding]:
    """Tensor, axis, source, destination, grad_partial: moves data along dims of other axes."""
    places = [parse_placement(str(text)) for text in call.op.args[2:4]]
    yield from same_dims(call, fixed=[p.dim for p in places if isinstance(p, Shard)])
    yield OpSharding(inputs=(P,), outputs=(P,))


@rule("planner.vocab_embedding")
def vocab_embedding(call: Call) -> Iterator[OpSharding]:
    """A range of rows [rows, hidden], indices […]: by token; the range is on another axis."""
    tokens = list(range(len(call.inputs[1])))
    yield from by_letters([[None, None], tokens], [[*tokens, None]])
