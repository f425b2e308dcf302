"""Convolution: by batch, by channel, and in space where no halo is needed.

A spatial dim can be sharded when windows do not overlap (kernel equals stride, no padding)
and each shard holds whole windows; otherwise neighbours would need each other's borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, Placed
from planner.language.ops.flops import output_numel, product_backward
from planner.language.ops.kernel import KernelCall, Saved, saved_factors
from planner.language.ops.letters import Letters, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, register


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
    # Whole groups: channels of the input and of the output are cut together.
    if groups % call.axis_size == 0:
        channel = Shard(len(batch))
        yield OpSharding(
            inputs=(channel, *(Shard(0),) * (len(call.inputs) - 1)), outputs=(channel,)
        )


def convolution_on_shard(placed: Placed) -> LocalForm:
    """With channels of a grouped convolution divided, each rank has its share of groups."""
    groups = placed.call.arg(6, "groups", 1)
    divided = placed.sharding.inputs[1] == Shard(0) and isinstance(placed.sharding.inputs[0], Shard)
    if groups == 1 or not divided:
        return LocalForm((placed.op,))
    return placed.with_argument(6, "groups", groups // placed.call.axis_size)


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


def _flop(call: Call) -> float:
    """Each entry of the output is a product with a kernel over the input's channels."""
    return 2.0 * output_numel(call) * prod(call.inputs[1][1:])


def _transposed_flop(call: Call) -> float:
    """Each entry of the input is multiplied by a kernel over the output's channels."""
    image, weight = call.inputs[:2]
    return 2.0 * prod(image) * prod(weight[1:])


def _factors(call: KernelCall) -> Saved:
    return Saved(tensors=saved_factors(call, *call.op.inputs[:2]))


_CONVOLUTION = OpFamily(
    name="convolution kernel",
    targets=aten("convolution"),
    worth_moving=True,
    arithmetic="convolution",
    flop=_flop,
    backward=product_backward,
    saved=_factors,
    recomputed=False,
)
register(_CONVOLUTION)
register(
    replace(
        _CONVOLUTION,
        name="convolution",
        targets=aten("conv1d conv2d conv3d"),
        shard=(ShardRule(convolution, contiguous=True),),
        local_form=convolution_on_shard,
    )
)
register(
    replace(
        _CONVOLUTION,
        name="transposed convolution",
        targets=aten("conv_transpose1d conv_transpose2d conv_transpose3d"),
        shard=(ShardRule(transposed_convolution),),
        flop=_transposed_flop,
    )
)
