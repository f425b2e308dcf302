"""Entries in another order along a dim: sorted, or turned.

The indices that sorting gives are numbers of rows: the row an entry lies in is a place in the
new order, the entry a place in the old one (`State.order`, `State.points`). To take rows by
such numbers, or to put rows to them, changes their order and no row; so does a product of each
run of rows with its own expert. Only where rows of two orders meet, or the number of a row
becomes a value, do samples meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Affine, size_at
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, normal_dim, normal_dims
from planner.language.ops.families.entries.reductions import along_dims, sum_of_sum
from planner.language.ops.kernel import saves_indices_of_result, saves_nothing
from planner.language.ops.letters import same_dims
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import ANY_ORDER, IN_ORDER, State
from planner.language.ops.samples.step import BOUND, BY_RULES, Across, Step


def order(call: Call) -> Iterator[OpSharding]:
    """Orders the entries along one dim, which stays whole."""
    index = {"aten.topk": 2, "aten.kthvalue": 2}.get(call.packet, 1)
    dim = call.arg(index, "dim", -1)
    if isinstance(dim, bool):  # sort.stable's second argument is `stable`
        dim = call.arg(2, "dim", -1)
    rank = len(call.inputs[0])
    yield from same_dims(call, fixed=(normal_dim(dim, rank),) if rank else ())


# ---------------------------------------------------------------------------------------- samples


def sorted_rows(step: Step) -> tuple[State, ...] | None:
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


def turned(step: Step) -> tuple[State, ...] | None:
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


# ---------------------------------------------------------------------------------------- records

register(
    OpFamily(
        name="turned dims",
        targets=aten("flip roll"),
        shard=(ShardRule(along_dims),),
        saved=saves_nothing,
        across=Across(sizes_only=True, handlers=(sum_of_sum, turned)),
    )
)
_ORDER = OpFamily(
    name="order along a dim",
    targets=aten("sort argsort"),
    shard=(ShardRule(order),),
    saved=saves_indices_of_result,
    recomputed=False,
    across=Across(sizes_only=True, handlers=(sorted_rows,)),
)
register(_ORDER)
register(
    replace(
        _ORDER,
        name="largest along a dim",
        targets=aten("topk kthvalue"),
        across=Across(sizes_only=True),
    )
)
register(
    replace(
        _ORDER,
        name="searches",
        targets=aten("unique_dim searchsorted"),
        shard=(),
        across=BY_RULES,
    )
)
