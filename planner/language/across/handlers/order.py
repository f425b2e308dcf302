"""Rows in another order: sorted by expert, computed on in runs, and put back.

The indices that sorting gives are numbers of rows: the row an entry lies in is a place in the
new order, the entry a place in the old one (`State.order`, `State.points`). To take rows by
such numbers, or to put rows to them, changes their order and no row; so does a product of each
run of rows with its own expert. Only where rows of two orders meet, or the number of a row
becomes a value, do samples meet.
"""

from __future__ import annotations

from dataclasses import replace

from planner.language.across.state import ADDED, ANY_ORDER, IN_ORDER, State
from planner.language.across.step import BOUND, Step, handles
from planner.language.graph import Affine, Arg, Ref, size_at
from planner.language.layout.placement import Shard
from planner.language.ops.call import normal_dim, normal_dims


@handles("arange")
def _arange(step: Step) -> tuple[State, ...] | None:
    """Numbers of rows, where there are as many as samples have."""
    if not step.growing(step.op.outputs[0]):
        return None
    bounds = step.op.args
    start = 0 if step.op.target.endswith("default") else bounds[0]
    stride = bounds[2] if step.op.target.endswith("start_step") and len(bounds) > 2 else 1
    rows, each = Shard(0), step.each(step.op.outputs[0], 0)
    if start != 0 or type(stride) is not int or not each:
        step.blame("mixed")
        return (State(rows=rows),)
    if stride == 1:
        return (State(rows=rows, order=ANY_ORDER, points=ANY_ORDER, each=each),)
    return (State(rows=rows, points=IN_ORDER, each=each * stride),)


@handles("randperm")
def _shuffled(step: Step) -> tuple[State, ...] | None:
    """Numbers of rows in an order of their own."""
    each = step.each(step.op.outputs[0], 0)
    order = step.op.name
    return (State(rows=Shard(0), order=order, points=IN_ORDER, each=each),) if each else None


@handles("sort", "argsort")
def _sort(step: Step) -> tuple[State, ...] | None:
    """Rows in the order of a number that each has, and where in the order before they were."""
    state, call = step.states[0], step.call
    dim = call.arg(1, "dim", -1)
    if isinstance(dim, bool):  # sort.stable's second argument is `stable`
        dim = call.arg(2, "dim", -1)
    shape = call.inputs[0]
    if state.rows != Shard(normal_dim(dim, len(shape))):
        return None
    if any(size > 1 for d, size in enumerate(shape) if d != state.rows.dim):
        return None  # each column in an order of its own
    each = step.each(step.op.inputs[0], state.rows.dim)
    if state.points is not None:  # the order that undoes an order
        if state.each != each:
            return None
        order = IN_ORDER if state.is_number else state.points
        values = State(rows=state.rows, order=order, points=order, each=each)
    else:
        order = step.op.name
        values = State(rows=state.rows, order=order)
    before = IN_ORDER if state.order == ANY_ORDER else state.order
    indices = State(rows=state.rows, order=order, points=before, each=each)
    return (indices,) if step.packet == "aten.argsort" else (values, indices)


@handles("planner.sort_rows")
def _sort_by_expert(step: Step) -> tuple[State, ...] | None:
    """Copies of rows by expert, where before they were, and where each expert's run ends."""
    rows, experts = step.states[:2]
    if rows.rows != Shard(0) or (experts.rows, experts.order) != (rows.rows, rows.order):
        return None
    order, each = step.op.name, step.each(step.op.outputs[1], 0)
    return (
        State(rows=rows.rows, order=order),
        State(rows=rows.rows, order=order, points=rows.order, each=each),
        State(sums=(step.op.name,), share=ADDED),
    )


@handles("planner.stack_of_runs")
def _weights_of_runs(step: Step) -> tuple[State, ...] | None:
    """Weights of experts: the ends of their runs tell alone which of them has a gradient."""
    ends, *weights = step.states
    plain = not any(each.rows or each.sums or each.loose or each.lost for each in weights)
    return (weights[0],) if plain and ends.sums else None


@handles("planner.unsort_rows")
def _back_from_experts(step: Step) -> tuple[State, ...] | None:
    """Sums of the copies of a row, in the order that rows had."""
    rows, order, *weights = step.states
    if rows.rows != Shard(0) or (order.rows, order.order) != (rows.rows, rows.order):
        return None
    if order.points is None:
        return None
    if any((each.rows, each.order) != (rows.rows, order.points) for each in weights):
        return None
    return (State(rows=rows.rows, order=order.points),)


@handles("flip", "roll")
def _turned(step: Step) -> tuple[State, ...] | None:
    """All samples in another order, the same one wherever it is done."""
    state = step.states[0]
    at = 2 if step.packet == "aten.roll" else 1
    rank = len(step.shape(step.op.inputs[0]))
    dims = normal_dims(step.arg(at, "dims"), rank)
    if at == 2 and _rolls_runs(step, state):
        return (state,)
    if state.rows is None or state.rows.dim not in dims or state.rows.segments > 1:
        return None
    if step.packet == "aten.roll" and step.arg(2, "dims", ()) == ():
        return None  # through all dims as one
    if state.equal:
        return None
    before = IN_ORDER if state.order == ANY_ORDER else state.order
    turn = "flip" if at == 1 else f"roll {step.op.args[1]}"
    order = (
        before.removeprefix("flip.") if at == 1 and before[:5] == "flip." else f"{turn}.{before}"
    )
    points = before if state.is_number else state.points
    return (replace(state, order=order, points=points),)


def _rolls_runs(step: Step, state: State) -> bool:
    """Whether whole runs of the batch's samples change places, in which no sample moves."""
    shifts, dims = step.op.args[1], step.arg(2, "dims", ())
    shape = step.call.inputs[0]
    if not isinstance(shifts, tuple) or len(shifts) != 1 or state.rows is None:
        return False
    along = normal_dims(dims, len(shape)) if dims else (0,) if len(shape) == 1 else ()
    if along != (state.rows.dim,) or state.points is not None:
        return False
    (shift,) = shifts
    if not isinstance(shift, int | Affine):
        return False
    return size_at(shift, BOUND) % (shape[along[0]] // state.rows.segments) == 0


@handles("floor_divide", "div", "remainder", "fmod", "mul", "add")
def _arithmetic(step: Step) -> tuple[State, ...] | None:
    """Numbers of rows become numbers of the samples they belong to, or of rows within one."""
    first = step.op.args[0]
    if not isinstance(first, Ref) or len(step.op.args) < 2 or step.of(first).points is None:
        return None
    state, number = step.of(first), step.op.args[1]
    packet = step.packet.removeprefix("aten.")
    if packet == "add":
        return _shifted(step, state, number)
    kept = State(rows=state.rows, order=state.order, points=state.points, each=state.each)
    if state.is_number:
        kept = replace(kept, order=IN_ORDER, points=IN_ORDER)
    if packet == "mul":
        return (replace(kept, each=state.each * number),) if type(number) is int else None
    if packet == "div" and step.arg(2, "rounding_mode") is None:
        return None
    within = replace(kept, points=None, each=0)
    is_rest = packet in ("remainder", "fmod")
    if type(number) is int and number > 0 and state.each % number == 0:
        return (within if is_rest else replace(kept, each=state.each // number),)
    if isinstance(number, Affine) and not number.fixed and state.each % number.per_sample == 0:
        return (replace(kept, each=number.per_sample) if is_rest else within,)
    return None


def _shifted(step: Step, state: State, number: Arg) -> tuple[State, ...] | None:
    """The number of a sample's first row, and how far in the sample another one is."""
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
