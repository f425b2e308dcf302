"""Two exports of one model → one list of ops with sizes affine in the batch size."""

from __future__ import annotations

from typing import Any

from planner.capture.record import Exported
from planner.errors import CaptureError
from planner.graph import Affine, Op, Size, TensorMeta
from planner.graph.blocks import RawGraph, RawOp

# Two sizes above one: a size of one would be specialised (broadcast, squeeze) by PyTorch.
BATCH_SIZES = (2, 3)


def align(first: Exported, second: Exported) -> RawGraph:
    """Merge two exports. Raises CaptureError naming the op that differs in more than sizes."""
    if len(first.ops) != len(second.ops):
        raise CaptureError(
            f"the model runs {len(first.ops)} ops on {BATCH_SIZES[0]} samples and "
            f"{len(second.ops)} on {BATCH_SIZES[1]}; forward must do the same for every batch size"
        )
    ops = []
    for raw, other, line in zip(first.ops, second.ops, first.lines, strict=True):
        one, two = raw.op, other.op
        if (one.target, one.outputs) != (two.target, two.outputs):
            raise CaptureError(
                f"op {one.target}{line} differs with the batch size; "
                "forward must do the same for every batch size"
            )
        merged = Op(
            name=one.name,
            target=one.target,
            args=_merge_arg(one.args, two.args, one, line),
            kwargs=_merge_arg(one.kwargs, two.kwargs, one, line),
            outputs=one.outputs,
            line=one.line,
        )
        ops.append(RawOp(op=merged, module=raw.module))
    tensors = {}
    for name, meta in first.tensors.items():
        other_meta = second.tensors[name]
        if len(meta.shape) != len(other_meta.shape) or meta.dtype != other_meta.dtype:
            raise CaptureError(f"tensor {name} differs with the batch size in rank or dtype")
        if repr(meta.data) != repr(other_meta.data):  # nan is not equal to itself
            raise CaptureError(
                f"constant {name} is made of other numbers for {BATCH_SIZES[0]} samples than for "
                f"{BATCH_SIZES[1]}; compute it from the batch's tensors"
            )
        shape = tuple(_affine(a, b) for a, b in zip(meta.shape, other_meta.shape, strict=True))
        tensors[name] = TensorMeta(
            **{f: getattr(meta, f) for f in meta.__dataclass_fields__} | {"shape": shape}
        )
    return RawGraph(tensors=tensors, inputs=first.inputs, ops=tuple(ops), loss=first.loss)


def _affine(one: Size, two: Size) -> Size:
    assert isinstance(one, int)
    assert isinstance(two, int)
    if one == two:
        return one
    (small, large) = BATCH_SIZES
    slope = (two - one) // (large - small)
    return Affine(slope, one - slope * small)


def _power(one: int, two: int) -> str:
    """Name the power of the batch size that two values are in proportion to; empty for others.

    Two values are on some line, too: 4 and 9 on 5 n - 6, as no size is.
    """
    small, large = BATCH_SIZES
    if one <= 0:
        return ""
    if one * large**2 == two * small**2 or one * large * (large - 1) == two * small * (small - 1):
        return "square"
    return "cube" if one * large**3 == two * small**3 else ""


def _merge_arg(one: Any, two: Any, op: Op, line: str) -> Any:
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        return tuple(_merge_arg(a, b, op, line) for a, b in zip(one, two, strict=True))
    if one == two and type(one) is type(two):
        return one
    if type(one) is int and type(two) is int:
        power = _power(one, two)
        if power:
            raise CaptureError(
                f"an argument of {op.target}{line} is {one} for {BATCH_SIZES[0]} samples and {two} "
                f"for {BATCH_SIZES[1]}, so it grows as the {power} of their number; write -1 for a "
                "size, divide twice by a number of samples"
            )
        return _affine(one, two)
    raise CaptureError(
        f"an argument of {op.target}{line} is {one} for {BATCH_SIZES[0]} samples and {two} for "
        f"{BATCH_SIZES[1]}; it must not depend on the batch size except as a size"
    )
