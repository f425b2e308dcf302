"""Pooling, resizing and other ops on images: each sample alone, mostly each channel too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, P, R
from planner.language.ops.kernel import KernelCall, Saved, saves_nothing
from planner.language.ops.letters import same_dims
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.step import Across


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


def by_sample(call: Call) -> Iterator[OpSharding]:
    """Each entry of the first dim alone; other tensors that have the dim go with it."""
    count = call.inputs[0][0] if call.inputs[0] else 0
    places = [
        Shard(0) if shape and shape[0] == count else R for shape in (*call.inputs, *call.outputs)
    ]
    cut = len(call.inputs)
    yield OpSharding(inputs=tuple(places[:cut]), outputs=tuple(places[cut:]))


def _with_positions(call: KernelCall) -> Saved:
    """Input and, for each output, the position (int64) of its maximum."""
    op = call.op
    if len(op.outputs) > 1:
        return Saved(tensors=(*op.inputs[:1], op.outputs[1]))
    return Saved(tensors=op.inputs[:1], extra_bytes=8 * call.numel(op.outputs[0]))


def _unless_a_mean(call: KernelCall) -> Saved:
    """Pooling to one value is a mean, which saves nothing."""
    spatial = prod(call.shape(call.op.outputs[0])[2:])
    return Saved() if spatial == 1 else Saved(tensors=call.op.inputs[:1])


_POOLING = OpFamily(
    name="average pooling",
    targets=aten("avg_pool1d avg_pool2d avg_pool3d"),
    shard=(ShardRule(per_channel),),
)
register(_POOLING)
register(
    replace(
        _POOLING,
        name="adaptive average pooling",
        targets=aten("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
        saved=_unless_a_mean,
    )
)
register(
    replace(
        _POOLING,
        name="maximum pooling",
        targets=aten(
            "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices"
            " adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
        ),
        saved=_with_positions,
    )
)
register(
    replace(
        _POOLING,
        name="resizing",
        targets=aten(
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d"
            " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
            " upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
            " pixel_shuffle"
        ),
        saved=saves_nothing,
    )
)
register(
    OpFamily(
        name="other ops on images",
        targets=aten(
            "im2col col2im pixel_unshuffle channel_shuffle grid_sampler max_unpool2d"
            " affine_grid_generator"
        ),
        across=Across(rule=by_sample),
    )
)
