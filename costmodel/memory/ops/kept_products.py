"""What products keep: each factor whose partner needs a gradient, as it is or as a copy in rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from costmodel.memory.ops.kept import Context, Kept
from costmodel.memory.ops.storage import Strides, reshaped_strides
from planner.graph import Op
from planner.ops.weight_products import LARGE_BYTES
from planner.units import DTYPE_BYTES


def linear(op: Op, context: Context) -> Kept:
    """A product of its first two inputs."""
    return _kept_factors(op.inputs[0], op.inputs[1], context)


def rows_linear(op: Op, context: Context) -> Kept:
    """A linear layer multiplies rows: an input whose dims can't be folded into rows in place is
    copied, and the copy is kept. Products with a large weight keep the input as it was given
    (`planner.runtime.stage.weight_grads`).
    """
    x, weight = op.inputs[:2]
    kept = linear(op, context)
    shape = context.shape(x)
    as_given = context.num_bytes(weight) >= LARGE_BYTES
    if x not in kept.tensors or as_given or has_rows(shape, context.storages.strides[x]):
        return kept
    others = tuple(name for name in kept.tensors if name != x)
    return Kept(tensors=others, extra_bytes=context.num_bytes(x))


def has_rows(shape: Sequence[int], strides: Strides) -> bool:
    """Whether all dims but the last can be folded into one in place."""
    rows = prod(shape[:-1]), shape[-1]
    return len(shape) <= 2 or reshaped_strides(shape, strides, rows) is not None


def addmm(op: Op, context: Context) -> Kept:
    """A product of its second and third input, added to the first."""
    return _kept_factors(op.inputs[1], op.inputs[2], context)


def _kept_factors(left: str, right: str, context: Context) -> Kept:
    kept = [left] if context.needs_grad(right) else []
    if context.needs_grad(left):
        kept.append(right)
    return Kept(tensors=tuple(kept))


def matmul(op: Op, context: Context) -> Kept:
    """Batched matmul folds its batch dims; a factor that can't be folded in place is copied."""
    left, right = op.inputs[:2]
    if len(context.shape(right)) <= 2 or len(context.shape(left)) <= 2:
        return _kept_factors(left, right, context)
    batch = context.shape(op.outputs[0])[:-2]
    tensors, extra = [], 0
    for name, partner in ((left, right), (right, left)):
        if not context.needs_grad(partner):
            continue
        shape = context.shape(name)
        expanded = shape[:-2] != batch
        folded = (prod(shape[:-2]), *shape[-2:])
        if expanded:
            extra += (
                prod(batch) * prod(shape[-2:]) * DTYPE_BYTES[context.program.tensor[name].dtype]
            )
        elif reshaped_strides(shape, context.storages.strides[name], folded) is None:
            extra += context.num_bytes(name)
        else:
            tensors.append(name)
    return Kept(tensors=tuple(tensors), extra_bytes=extra)
