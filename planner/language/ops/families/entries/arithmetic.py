"""Sums, products, quotients and choices element by element, with broadcasting.

Each is linear in an input, so it may take that as Partial: a sum over ranks passes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Ref
from planner.language.layout.placement import OpSharding
from planner.language.ops.call import Call, P, R
from planner.language.ops.kernel import (
    KernelCall,
    Saved,
    in_order_of_inputs,
    saved_factors,
    saves_inputs,
    saves_nothing,
    unreduced_gradients,
)
from planner.language.ops.letters import pointwise
from planner.language.ops.record import Across, OpFamily, ShardRule, aten, register


def add(call: Call) -> Iterator[OpSharding]:
    """Two tensors may both be Partial; a number may not be added once on each rank."""
    yield from pointwise(call)
    if len(call.inputs) == 2 and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(P, P), outputs=(P,))


def mul(call: Call) -> Iterator[OpSharding]:
    """Linear in each factor of a product, and in the dividend of a plain quotient."""
    yield from pointwise(call)
    if not call.is_floating(call.op.outputs[0]) or call.arg(2, "rounding_mode") is not None:
        return
    divides = "mul" not in call.packet
    for position in range(1 if divides else len(call.inputs)):
        # The dividend may be a number: then the only tensor is the divisor.
        if isinstance(call.op.args[0], Ref) or not divides:
            inputs = tuple(P if i == position else R for i in range(len(call.inputs)))
            yield OpSharding(inputs=inputs, outputs=(P,))


def where(call: Call) -> Iterator[OpSharding]:
    """Chooses between two tensors, or numbers; linear in a pair of tensors."""
    if len(call.op.args) < 3:
        return  # where(condition) returns indices, whose number is not known
    yield from pointwise(call)
    if len(call.inputs) == 3 and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(R, P, P), outputs=(P,))


def masked_fill(call: Call) -> Iterator[OpSharding]:
    """Linear in the tensor when what is filled in is zero."""
    yield from pointwise(call)
    if len(call.inputs) == 2 and call.arg(2, "value") == 0:
        yield OpSharding(inputs=(P, R), outputs=(P,))


# ------------------------------------------------------------------------------------- memory


def _factors(call: KernelCall) -> Saved:
    """`a * b` saves each factor whose partner needs a gradient."""
    if len(call.op.inputs) < 2:
        return Saved()
    return Saved(tensors=saved_factors(call, *call.op.inputs[:2]))


def _quotient(call: KernelCall) -> Saved:
    """The gradient of a / b reads b, and that of b reads a too."""
    names = call.op.inputs
    if len(names) < 2:
        return Saved()
    return Saved(tensors=names[:2] if call.needs_grad(names[1]) else names[1:2])


# ---------------------------------------------------------------------------------------- records

_ADDITION = OpFamily(
    name="addition",
    targets=aten("add sub rsub"),
    shard=(ShardRule(add),),
    result=in_order_of_inputs,
    saved=saves_nothing,
    elements_alone=True,
    across=Across(algebra="addition"),
)
register(_ADDITION)
register(
    replace(
        _ADDITION,
        name="product of entries",
        targets=aten("mul multiply"),
        shard=(ShardRule(mul),),
        saved=_factors,
        unreduced=unreduced_gradients,
        across=Across(algebra="product"),
    )
)
register(
    replace(
        _ADDITION,
        name="quotient of entries",
        targets=aten("div divide true_divide"),
        shard=(ShardRule(mul),),
        saved=_quotient,
        across=Across(algebra="quotient"),
    )
)
register(
    OpFamily(
        name="choice between two tensors",
        targets=aten("where"),
        shard=(ShardRule(where),),
        result=in_order_of_inputs,
        saved=saves_inputs(0),
    )
)
register(
    OpFamily(
        name="masked fill",
        targets=aten("masked_fill"),
        shard=(ShardRule(masked_fill),),
        result=in_order_of_inputs,
        saved=saves_inputs(1),
    )
)
