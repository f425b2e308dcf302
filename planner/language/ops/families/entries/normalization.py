"""Normalisation of rows, of groups of channels, and of channels over a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from planner.language.graph import Ref
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, Placed
from planner.language.ops.families.images import by_sample
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.letters import Letters, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import IN_ORDER, State
from planner.language.ops.samples.step import Across, Step


def layer_norm(call: Call) -> Iterator[OpSharding]:
    """Tensor, normalized_shape, weight, bias; further outputs are the statistics."""
    shape = call.inputs[0]
    outer = len(shape) - len(call.op.args[1])  # type: ignore[arg-type]
    letters = [*range(outer), *[None] * (len(shape) - outer)]
    weights = [[None] * len(s) for s in call.inputs[1:]]
    outputs = [[*range(outer), *[None] * (len(s) - outer)] for s in call.outputs]
    yield from by_letters([letters, *weights], outputs)


def batch_norm(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …], weight, bias, running mean and variance [c], training.

    By channel; in training statistics are over the whole batch, so samples stay together.
    Running ones that are written rest whole on every rank.
    """
    training = bool(call.arg(5, "training", True))
    rank = len(call.inputs[0])
    x: Letters = ["c" if d == 1 else None if training else d for d in range(rank)]
    rest: list[Letters] = [["c"] for _ in call.inputs[1:]]
    if _writes_running(call):
        rest[-2:] = [[None], [None]]
    yield from by_letters([x, *rest], [x])


def batch_norm_on_shard(placed: Placed) -> LocalForm:
    """With channels divided, a rank computes the statistics of its own and receives the others'."""
    if not _writes_running(placed.call):
        return LocalForm((placed.op,))
    return placed.with_args(*placed.op.args, placed.axis, target="planner.batch_norm_by_channel")


def _writes_running(call: Call) -> bool:
    return bool(call.arg(5, "training", True)) and call.arg(3, "running_mean") is not None


def group_norm(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …], number of groups, weight [c], bias [c]: by sample or by whole groups."""
    rank = len(call.inputs[0])
    channel = "c" if call.op.args[1] % call.axis_size == 0 else None  # type: ignore[operator]
    x: Letters = ["n", channel, *[None] * (rank - 2)]
    weights: list[Letters] = [[channel] for _ in call.inputs[1:]]
    yield from by_letters([x, *weights], [x])


def group_norm_on_shard(placed: Placed) -> LocalForm:
    """With channels divided, each rank has its share of the groups."""
    if placed.sharding.inputs[0] != Shard(1):
        return LocalForm((placed.op,))
    groups = int(placed.op.args[1])  # type: ignore[arg-type]
    return placed.with_argument(1, "num_groups", groups // placed.call.axis_size)


def instance_norm(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …], weight and bias [c]: each channel of each sample alone."""
    if call.arg(3, "running_mean") is not None:
        return  # running statistics are written in place
    x: Letters = ["n", "c", *[None] * (len(call.inputs[0]) - 2)]
    yield from by_letters([x, *([["c"]] * (len(call.inputs) - 1))], [x])


# --------------------------------------------------------------------------- saved for backward


def _row_statistics(call: KernelCall, statistics: int) -> Saved:
    """Inputs, and so many statistics of each normalised row."""
    op, source = call.op, call.op.inputs[0]
    if len(op.outputs) > 1:  # the statistics are tensors of the program
        return Saved(tensors=(*op.inputs, *op.outputs[1:]))
    shape = call.shape(source)
    normalised = op.args[1] if isinstance(op.args[1], tuple) else (shape[-1],)
    rows = prod(shape[: len(shape) - len(normalised)])
    return Saved(tensors=op.inputs, extra_bytes=statistics * rows * call.statistic_bytes(source))


def _group_statistics(call: KernelCall) -> Saved:
    """Input, weight, and mean and reciprocal deviation of each group of each sample."""
    source, groups = call.op.inputs[0], int(call.op.args[1])  # type: ignore[arg-type]
    rows = call.shape(source)[0] * groups
    return Saved(tensors=call.op.inputs[:2], extra_bytes=2 * rows * call.statistic_bytes(source))


def _batch_statistics(call: KernelCall) -> Saved:
    """Input, weight and running statistics, and in training the batch's mean and reciprocal
    deviation of each channel.
    """
    args, source = call.op.args, call.op.inputs[0]
    channels = call.shape(source)[1] if bool(args[5]) else 0
    tensors = tuple(ref.name for ref in (*args[:2], *args[3:5]) if isinstance(ref, Ref))
    return Saved(tensors=tensors, extra_bytes=2 * channels * call.statistic_bytes(source))


# ---------------------------------------------------------------------------------------- records

_LAYER_NORM = OpFamily(
    name="layer norm",
    targets=aten("layer_norm native_layer_norm"),
    shard=(ShardRule(layer_norm),),
    flop_per_element=8,
    rows_alone=True,
    saved=lambda call: _row_statistics(call, 2),  # mean and reciprocal deviation
)
register(_LAYER_NORM)
register(
    replace(
        _LAYER_NORM,
        name="root-mean-square norm",
        targets=aten("rms_norm _fused_rms_norm"),
        flop_per_element=5,
        saved=lambda call: _row_statistics(call, 1),  # reciprocal root of the mean square
    )
)
register(
    OpFamily(
        name="group norm",
        targets=aten("group_norm"),
        shard=(ShardRule(group_norm, contiguous=True),),
        local_form=group_norm_on_shard,
        flop_per_element=8,
        saved=_group_statistics,
    )
)
register(
    OpFamily(
        name="group norm kernel",
        targets=aten("native_group_norm"),
        flop_per_element=8,
        across=Across(rule=by_sample),
    )
)


def _running_statistics(step: Step) -> tuple[State, ...] | None:
    """Running statistics are means over samples, written to buffers."""
    if step.arg(3, "running_mean") is None or not step.arg(5, "use_input_stats", True):
        return None
    step.blame("buffer")
    return (replace(step.states[0], equal=False),)


register(
    OpFamily(
        name="instance norm",
        targets=aten("instance_norm"),
        shard=(ShardRule(instance_norm),),
        across=Across(handlers=(_running_statistics,)),
    )
)


def _statistics_of_the_batch(step: Step) -> tuple[State, ...] | None:
    """In training it computes across samples, of which
    `planner.language.across.cut.batch_statistics` tells.
    """
    if not step.arg(5, "training", True):
        return None
    step.blame_sums()
    return (replace(step.states[0], points=None, equal=False, order=IN_ORDER),)


register(
    OpFamily(
        name="batch norm",
        targets=aten("batch_norm"),
        shard=(ShardRule(batch_norm),),
        local_form=batch_norm_on_shard,
        flop_per_element=8,
        saved=_batch_statistics,
        mutates=True,
        across=Across(handlers=(_statistics_of_the_batch,)),
    )
)
register(
    OpFamily(
        name="batch norm of a shard of channels",
        targets=("planner.batch_norm_by_channel",),
        flop_per_element=8,
        saved=_batch_statistics,
        recomputed=False,
    )
)
