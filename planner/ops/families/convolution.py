"""Convolution, pooling and resizing: by batch, by channel, and in space where no halo is needed.

A spatial dim can be sharded when windows do not overlap (kernel equals stride, no padding)
and each shard holds whole windows; otherwise neighbours would need each other's borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, P
from planner.ops.letters import Letters, by_letters, same_dims
from planner.ops.registry import LocalForm, Placed, local_form, rule

_CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")
_TRANSPOSED = ("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")


@rule(*_CONVOLUTIONS, contiguous=True)
def convolution(call: Call) -> Iterator[OpSharding]:
    """Input [n, i, …] or [i, …], weight [o, i / groups, …], bias [o]."""
    weight = call.inputs[1]
    num_spatial = len(weight) - 2
    groups = call.arg(6, "groups", 1)
    batch = ["n"] if len(call.inputs[0]) == num_spatial + 2 else []
    spatial = [
        f"s{d}" if _has_no_halo(call, weight, d, num_spatial) else None for d in range(num_spatial)
    ]
    if groups == 1:
        yield from _channels(call, batch, spatial, ["o", "i"])
        return
    yield from _channels(call, batch, spatial, [None, None])
    if groups % call.axis_size == 0:
        channel = Shard(len(batch))
        yield OpSharding(
            inputs=(channel, *(Shard(0),) * (len(call.inputs) - 1)), outputs=(channel,)
        )


@local_form(*_CONVOLUTIONS)
def convolution_on_shard(placed: Placed) -> LocalForm:
    """With channels of a grouped convolution divided, each rank has its share of groups."""
    groups = placed.call.arg(6, "groups", 1)
    divided = placed.sharding.inputs[1] == Shard(0) and isinstance(placed.sharding.inputs[0], Shard)
    if groups == 1 or not divided:
        return LocalForm((placed.op,))
    return _with_argument(placed, 6, "groups", groups // placed.call.axis_size)


@rule(*_TRANSPOSED)
def transposed_convolution(call: Call) -> Iterator[OpSharding]:
    """Input [n, i, …], weight [i, o / groups, …], bias [o]; each window may overlap the next."""
    num_spatial = len(call.inputs[1]) - 2
    batch = ["n"] if len(call.inputs[0]) == num_spatial + 2 else []
    names: list[str | None] = ["i", "o"] if call.arg(6, "groups", 1) == 1 else [None, None]
    yield from _channels(call, batch, [None] * num_spatial, names)


def _channels(
    call: Call, batch: list[str], spatial: list[str | None], weight: list[str | None]
) -> Iterator[OpSharding]:
    channel_in = "i" if "i" in weight else None
    channel_out = "o" if "o" in weight else None
    x: Letters = [*batch, channel_in, *spatial]
    kernel: Letters = [*weight, *[None] * len(spatial)]
    out: Letters = [*batch, channel_out, *spatial]
    letters: list[Letters] = [x, kernel, [channel_out]]
    yield from by_letters(letters[: len(call.inputs)], [out], summed="i", addends=(2,))


def _has_no_halo(call: Call, weight: tuple[int, ...], dim: int, num_spatial: int) -> bool:
    def setting(index: int, name: str, default: int) -> Any:
        value = call.arg(index, name, default)
        return value[dim if len(value) > 1 else 0] if isinstance(value, tuple) and value else value

    kernel = weight[2 + dim]
    stride, padding, dilation = (
        setting(3, "stride", 1),
        setting(4, "padding", 0),
        setting(5, "dilation", 1),
    )
    local, rest = divmod(call.inputs[0][dim - num_spatial], call.axis_size)
    whole_windows = kernel == stride and rest == 0 and local % kernel == 0
    return whole_windows and padding in (0, "valid") and dilation == 1


def _with_argument(placed: Placed, index: int, name: str, value: int) -> LocalForm:
    """Return the op with one argument changed, whether it was given by place or by name."""
    op = placed.op
    if index < len(op.args):
        return LocalForm((replace(op, args=(*op.args[:index], value, *op.args[index + 1 :])),))
    kwargs = tuple((key, value if key == name else old) for key, old in op.kwargs)
    return LocalForm((replace(op, kwargs=kwargs),))


@rule(
    *(f"aten.{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
    *(f"aten.max_pool{n}d_with_indices" for n in (2, 3)),
    *(f"aten.adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
    *(f"aten.upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"aten._upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    "aten.upsample_linear1d",
    "aten.upsample_bilinear2d",
    "aten.upsample_trilinear3d",
    "aten.upsample_bicubic2d",
    "aten.pixel_shuffle",
)
def per_channel(call: Call) -> Iterator[OpSharding]:
    """Works in space, on each channel of each sample alone."""
    rank = len(call.inputs[0])
    if call.packet == "aten.pixel_shuffle":  # mixes channels into space
        yield from same_dims(call, fixed=range(rank - 3, rank))
    else:
        num_spatial = int(next(c for c in call.packet if c.isdigit()))
        yield from same_dims(call, fixed=range(rank - num_spatial, rank))
    if "max" not in call.packet:
        yield OpSharding(inputs=(P,), outputs=(P,) * len(call.outputs))


@rule("aten.batch_norm")
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


@local_form("aten.batch_norm")
def batch_norm_on_shard(placed: Placed) -> LocalForm:
    """With channels divided, a rank computes the statistics of its own and hears of the others'."""
    if not _writes_running(placed.call):
        return LocalForm((placed.op,))
    return placed.with_args(*placed.op.args, placed.axis, target="planner.batch_norm_by_channel")


def _writes_running(call: Call) -> bool:
    return bool(call.arg(5, "training", True)) and call.arg(3, "running_mean") is not None


@rule("aten.group_norm", contiguous=True)
def group_norm(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …], number of groups, weight [c], bias [c]: by sample or by whole groups."""
    rank = len(call.inputs[0])
    channel = "c" if call.op.args[1] % call.axis_size == 0 else None  # type: ignore[operator]
    x: Letters = ["n", channel, *[None] * (rank - 2)]
    weights: list[Letters] = [[channel] for _ in call.inputs[1:]]
    yield from by_letters([x, *weights], [x])


@local_form("aten.group_norm")
def group_norm_on_shard(placed: Placed) -> LocalForm:
    """With channels divided, each rank has its share of the groups."""
    if placed.sharding.inputs[0] != Shard(1):
        return LocalForm((placed.op,))
    groups = int(placed.op.args[1])  # type: ignore[arg-type]
    return _with_argument(placed, 1, "num_groups", groups // placed.call.axis_size)


@rule("aten.instance_norm")
def instance_norm(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …], weight and bias [c]: each channel of each sample alone."""
    if call.arg(3, "running_mean") is not None:
        return  # running statistics are written in place
    x: Letters = ["n", "c", *[None] * (len(call.inputs[0]) - 2)]
    yield from by_letters([x, *([["c"]] * (len(call.inputs) - 1))], [x])
