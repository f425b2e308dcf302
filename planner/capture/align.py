"""Two exports of one model → one list of ops with sizes affine in the batch size."""

from __future__ import annotations

from typing import Any

from planner.capture.blocks import RawGraph, RawOp
from planner.capture.reading.record import Exported
from planner.errors import CaptureError
from planner.language.graph import Affine, Op, Size, TensorMeta

# Two sizes above one: a size of one would be specialised (broadcast, squeeze) by PyTorch.
BATCH_SIZES = (2, 3)


class UnlikeExports(CaptureError):
    """A model does not compute the same on batches of two sizes; `place` is the call and its line
    that tell, if one does.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def align(first: Exported, second: Exported) -> RawGraph:
    """Merge two exports. Raises UnlikeExports naming the op that differs in more than sizes."""
    if len(first.ops) != len(second.ops):
        # (Of more units it runs more ops, too, whatever a unit is.)
        raise CaptureError(
            f"the model runs {len(first.ops)} ops on {BATCH_SIZES[0]} samples and "
            f"{len(second.ops)} on {BATCH_SIZES[1]}; forward must do the same for every batch size"
        )
    ops = []
    for raw, other, line in zip(first.ops, second.ops, first.lines, strict=True):
        small_op, large_op = raw.op, other.op
        if (small_op.target, small_op.outputs) != (large_op.target, large_op.outputs):
            raise UnlikeExports(
                f"op {small_op.target}{line} differs with the batch size; "
                "forward must do the same for every batch size"
            )
        tensors_of = (*small_op.inputs, *small_op.outputs)
        is_floating = all("float" in first.tensors[name].dtype for name in tensors_of)
        merged = Op(
            name=small_op.name,
            target=small_op.target,
            args=_merge_arg(small_op.args, large_op.args, small_op, line, is_floating),
            kwargs=_merge_arg(small_op.kwargs, large_op.kwargs, small_op, line, is_floating),
            outputs=small_op.outputs,
            line=small_op.line,
        )
        ops.append(RawOp(op=merged, module=raw.module))
    tensors = {}
    for name, meta in first.tensors.items():
        other_meta = second.tensors[name]
        if len(meta.shape) != len(other_meta.shape) or meta.dtype != other_meta.dtype:
            raise UnlikeExports(
                f"tensor {name} has another rank or dtype for another batch size; forward must do "
                "the same for every batch size"
            )
        if repr(meta.data) != repr(other_meta.data):  # nan is not equal to itself
            raise UnlikeExports(
                f"constant {name} is made of other numbers for {BATCH_SIZES[0]} samples than for "
                f"{BATCH_SIZES[1]}; compute it from the batch's tensors"
            )
        shape = tuple(_affine(a, b) for a, b in zip(meta.shape, other_meta.shape, strict=True))
        tensors[name] = TensorMeta(
            **{f: getattr(meta, f) for f in meta.__dataclass_fields__} | {"shape": shape}
        )
    return RawGraph(tensors=tensors, inputs=first.inputs, ops=tuple(ops), loss=first.loss)


def _affine(at_small: Size, at_large: Size) -> Size:
    assert isinstance(at_small, int)
    assert isinstance(at_large, int)
    if at_small == at_large:
        return at_small
    (small, large) = BATCH_SIZES
    # The line through both points.
    slope = (at_large - at_small) // (large - small)
    return Affine(slope, at_small - slope * small)


def _power(at_small: int, at_large: int) -> str:
    """Name the power of the batch size that two values are in proportion to; empty for others.

    Two values are on some line, too: 4 and 9 on 5 n - 6, as no size is.
    """
    small, large = BATCH_SIZES
    if at_small <= 0:
        return ""
    if at_small * large**2 == at_large * small**2 or at_small * large * (
        large - 1
    ) == at_large * small * (small - 1):
        return "square"
    return "cube" if at_small * large**3 == at_large * small**3 else ""


def _merge_arg(at_small: Any, at_large: Any, op: Op, line: str, is_floating: bool) -> Any:
    """Return what an argument is for any number of samples.

    A whole number is the same to an op of floats whether it is written as an int or as a float:
    rows that were counted from 0.0 on.
    """
    if (
        isinstance(at_small, tuple)
        and isinstance(at_large, tuple)
        and len(at_small) == len(at_large)
    ):
        pairs = zip(at_small, at_large, strict=True)
        return tuple(_merge_arg(a, b, op, line, is_floating) for a, b in pairs)
    # (By spelling: nan is not equal to itself.)
    if type(at_small) is type(at_large) and repr(at_small) == repr(at_large):
        return at_small
    if is_floating and _is_whole_float(at_small) and _is_whole_float(at_large):
        at_small, at_large = int(at_small), int(at_large)
    if type(at_small) is int and type(at_large) is int:
        power = _power(at_small, at_large)
        if power:
            raise UnlikeExports(
                f"an argument of {op.target}{line} is {at_small} for {BATCH_SIZES[0]} samples and "
                f"{at_large} for {BATCH_SIZES[1]}, so it grows as the {power} of their number; "
                "write -1 for a size, divide twice by a number of samples"
            )
        return _affine(at_small, at_large)
    raise UnlikeExports(
        f"an argument of {op.target}{line} is {at_small} for {BATCH_SIZES[0]} samples and "
        f"{at_large} for {BATCH_SIZES[1]}; it must not depend on the batch size except as a size"
    )


def _is_whole_float(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
