"""Sums, products, quotients and choices element by element, with broadcasting.

Each is linear in an input, so it may take that as Partial: a sum over ranks passes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Affine, Arg, Ref
from planner.language.layout.placement import OpSharding, Shard
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
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import ADDED, IN_ORDER, SCALED, State
from planner.language.ops.samples.step import Across, Step


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


# ---------------------------------------------------------------------------------------- samples

# Numbers of rows become numbers of the samples they belong to, or of rows within one.


def added_to_numbers(step: Step) -> tuple[State, ...] | None:
    """The number of a sample's first row, and how far in the sample another one is."""
    found = _numbers_of_rows(step)
    if found is None:
        return None
    state, number = found
    if type(number) is int and number == 0:
        return (state,)
    first = step.op.args[0]
    assert isinstance(first, Ref)
    maker = step.walk.maker.get(first.name)
    if maker is None:
        return None
    if maker.target == "aten.arange.start_step":
        stride = maker.args[2] if len(maker.args) > 2 else 1
    elif maker.target.startswith("aten.mul."):
        stride = maker.args[1]
    else:
        return None
    if type(number) is int and type(stride) is int and 0 <= number < stride:
        return (state,)
    offset = step.of(number)
    if not isinstance(number, Ref) or offset.sums or offset.points is not None:
        return None
    if offset.rows is not None and (offset.rows, offset.order) != (state.rows, state.order):
        return None
    rows = step.growing(step.op.outputs[0])
    return (replace(state, rows=Shard(rows[0])),) if len(rows) == 1 else None


def times_numbers(step: Step) -> tuple[State, ...] | None:
    """Numbers of samples become those of their first rows."""
    found = _numbers_of_rows(step)
    if found is None:
        return None
    state, number = found
    if type(number) is not int:
        return None
    return (replace(_in_batch(state), each=state.each * number),)


def numbers_divided(step: Step) -> tuple[State, ...] | None:
    """The number of the sample that a row belongs to; divided by that of samples, one within it."""
    found = _numbers_of_rows(step)
    is_exact = step.packet != "aten.floor_divide" and step.arg(2, "rounding_mode") is None
    if found is None or is_exact:
        return None
    state, number = found
    kept = _in_batch(state)
    if type(number) is int and number > 0 and state.each % number == 0:
        return (replace(kept, each=state.each // number),)
    if isinstance(number, Affine) and not number.fixed and state.each % number.per_sample == 0:
        return (replace(kept, points=None, each=0),)
    return None


def rest_of_numbers(step: Step) -> tuple[State, ...] | None:
    """The number of a row within its sample; of the rest by that of samples, the sample's."""
    found = _numbers_of_rows(step)
    if found is None:
        return None
    state, number = found
    kept = _in_batch(state)
    if type(number) is int and number > 0 and state.each % number == 0:
        return (replace(kept, points=None, each=0),)
    if isinstance(number, Affine) and not number.fixed and state.each % number.per_sample == 0:
        return (replace(kept, each=number.per_sample),)
    return None


def _numbers_of_rows(step: Step) -> tuple[State, Arg] | None:
    """The first of two arguments, if it is numbers of rows, and the second."""
    first = step.op.args[0]
    if not isinstance(first, Ref) or len(step.op.args) < 2 or step.of(first).points is None:
        return None
    return step.of(first), step.op.args[1]


def _in_batch(state: State) -> State:
    """Numbers of rows that are no longer just each row's own."""
    kept = State(rows=state.rows, order=state.order, points=state.points, each=state.each)
    return replace(kept, order=IN_ORDER, points=IN_ORDER) if state.is_number else kept


def quotient(step: Step) -> tuple[State, ...] | None:
    """A sum over samples, divided by a value of the whole batch or by another sum."""
    if len(step.states) != 2:
        return None
    above, below = step.states
    if above.sums and below.whole and step.arg(2, "rounding_mode") is None:
        if above.share in (ADDED, SCALED) and step.walk.bound[step.op.inputs[1]].numel_at(1) == 1:
            terms = (*(t for t in above.terms if t != ADDED), below.whole)
            return (State(sums=above.sums, share=SCALED, terms=tuple(sorted(set(terms)))),)
        return None
    if not below.sums or below.pure or not (above.sums or above.rows):
        return None
    step.blame("normaliser", *below.sums)
    if above.sums:
        return (State(sums=above.sums),)
    return (State(rows=above.rows, order=above.order),)


# ---------------------------------------------------------------------------------------- records

_ADDITION = OpFamily(
    name="addition",
    targets=aten("add"),
    shard=(ShardRule(add),),
    result=in_order_of_inputs,
    saved=saves_nothing,
    elements_alone=True,
    across=Across(algebra="addition", handlers=(added_to_numbers,)),
)
register(_ADDITION)
register(
    replace(
        _ADDITION,
        name="difference",
        targets=aten("sub rsub"),
        across=Across(algebra="addition"),
    )
)
register(
    replace(
        _ADDITION,
        name="product of entries",
        targets=aten("mul multiply"),
        shard=(ShardRule(mul),),
        saved=_factors,
        unreduced=unreduced_gradients,
        across=Across(algebra="product", handlers=(times_numbers,)),
    )
)
register(
    replace(
        _ADDITION,
        name="quotient of entries",
        targets=aten("div divide true_divide"),
        shard=(ShardRule(mul),),
        saved=_quotient,
        across=Across(algebra="quotient", handlers=(quotient, numbers_divided)),
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
