"""Ops that make a tensor from nothing or from a shape, and random ones."""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, P, R
from planner.ops.letters import pointwise, same_dims
from planner.ops.registry import LocalForm, Placed, local_form, rule

_SIZE_FIRST = ("aten.full", "aten.zeros", "aten.ones", "aten.empty")
_SIZE_SECOND = ("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")


@rule(*_SIZE_FIRST, *_SIZE_SECOND)
def constant(call: Call) -> Iterator[OpSharding]:
    """Equal entries: any dim can be sharded, each rank makes less."""
    for dim in range(len(call.outputs[0])):
        yield OpSharding(inputs=(R,) * len(call.inputs), outputs=(Shard(dim),))


@local_form(*_SIZE_FIRST)
def constant_on_shard(placed: Placed) -> LocalForm:
    """The same op with the sizes of the shard."""
    args = (placed.local_output(), *placed.op.args[1:])
    return placed.with_args(*args, kwargs=placed.op.kwargs)


@local_form(*_SIZE_SECOND)
def constant_like_on_shard(placed: Placed) -> LocalForm:
    """The same op with the sizes of the shard."""
    args = (placed.op.args[0], placed.local_output(), *placed.op.args[2:])
    return placed.with_args(*args, kwargs=placed.op.kwargs)


@rule("aten.feature_dropout")
def feature_dropout(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …]: whole channels of a sample are dropped, so shards hold whole ones."""
    fixed = range(2, len(call.inputs[0])) if _draws(call) else ()
    yield from same_dims(call, fixed=fixed)
    if not _draws(call):
        yield OpSharding(inputs=(P,), outputs=(P,))


@rule("aten.dropout", "aten.native_dropout", "aten.alpha_dropout")
def dropout(call: Call) -> Iterator[OpSharding]:
    """Masks are equal on replicas and independent on shards."""
    yield from pointwise(call)
    if not _draws(call):
        yield OpSharding(inputs=(P,), outputs=(P,))


@local_form("aten.dropout", "aten.native_dropout", "aten.feature_dropout", "aten.alpha_dropout")
def dropout_on_shard(placed: Placed) -> LocalForm:
    """Drawn from the rank's own stream of random numbers, so shards differ."""
    if not _draws(placed.call) or not isinstance(placed.sharding.outputs[0], Shard):
        return LocalForm((placed.op,))
    return own_stream(placed)


def own_stream(placed: Placed) -> LocalForm:
    """Run the op unchanged but with random numbers that differ on each rank of the axis."""
    return placed.with_args(
        placed.op.target,
        placed.axis,
        *placed.op.args,
        target="planner.with_own_random_stream",
        kwargs=placed.op.kwargs,
    )


def _draws(call: Call) -> bool:
    """Whether a dropout op draws a mask at all."""
    return bool(call.arg(2, "train", True)) and call.arg(1, "p", 0.5) > 0
