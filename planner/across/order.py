"""Rows in another order: sorted by expert, computed on in runs, and put back.

The indices that sorting gives are numbers of rows: the row an entry lies in is a place in the
new order, the entry a place in the old one (`State.order`, `State.points`). To take rows by
such numbers, or to put rows to them, changes their order and no row; so does a product of each
run of rows with its own expert. Only where rows of two orders meet, or the number of a row
becomes a value, do samples meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.across.ops import Step, handles
from planner.across.state import ANY_ORDER, IN_ORDER, State
from planner.graph import Affine, Arg, Op, Ref
from planner.layout.placement import Shard
from planner.ops.call import normal_dim, normal_dims
from planner.ops.record import family_of


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
    if state.rows != Shard(normal_dim(dim, len(shape))) or state.power:
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


@handles("flip", "roll")
def _turned(step: Step) -> tuple[State, ...] | None:
    """All samples in another order, the same one wherever it is done."""
    state = step.states[0]
    at = 2 if step.packet == "aten.roll" else 1
    rank = len(step.shape(step.op.inputs[0]))
    dims = normal_dims(step.arg(at, "dims"), rank)
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
    if maker is None or not maker.target.startswith("aten.mul."):
        return None
    stride = maker.args[1]
    if type(number) is int and type(stride) is int and 0 <= number < stride:
        return (state,)
    offset = step.of(number)
    if not isinstance(number, Ref) or offset.sums or offset.power or offset.points is not None:
        return None
    if offset.rows is not None and (offset.rows, offset.order) != (state.rows, state.order):
        return None
    rows = step.growing(step.op.outputs[0])
    return (replace(state, rows=Shard(rows[0])),) if len(rows) == 1 else None


# ------------------------------------------------------------------------ taking and putting


@handles("index")
def _index(step: Step) -> tuple[State, ...] | None:
    """Tensor, numbers for some of its dims."""
    return _take(step, step.op.args[0], _by_dim(step.op.args[1]))


@handles("index_select")
def _index_select(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, numbers."""
    source, dim, index = step.op.args[:3]
    return _take(step, source, {_dim(step, source, dim): index})


@handles("embedding")
def _embedding(step: Step) -> tuple[State, ...] | None:
    """Table, numbers: its rows may be those of the batch."""
    table, index = step.op.args[:2]
    return _take(step, table, {0: index})


@handles("index_put", "_unsafe_index_put")
def _index_put(step: Step) -> tuple[State, ...] | None:
    """Tensor, numbers for some of its dims, rows to put there."""
    target, indices, values = step.op.args[:3]
    return _put(step, target, _by_dim(indices), values)


@handles("index_add", "index_copy")
def _index_add(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, numbers, rows to put there."""
    target, dim, index, values = step.op.args[:4]
    return _put(step, target, {_dim(step, target, dim): index}, values)


@handles("gather")
def _gather(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, a number for each entry of the result."""
    source, dim, index = step.op.args[:3]
    state = step.of(source)
    at = Shard(_dim(step, source, dim))
    numbers = _places(step.of(index), state, _each(step, source, at))
    if state.rows != at or numbers is None:
        return None
    return (
        (replace(state, order=numbers.order, equal=False),) if numbers.rows == state.rows else None
    )


@handles("scatter", "scatter_add")
def _scatter(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, a number for each entry of the source."""
    target, dim, index, values = step.op.args[:4]
    at = Shard(_dim(step, target, dim))
    if step.of(target).rows != at or step.of(index).rows != at:
        return None
    each = _each(step, target, at)
    return _placed(step.of(target), step.of(index), step.of(values), at, each)


@handles("_grouped_mm", "transformers.grouped_mm_fallback", "planner.grouped_mm")
def _grouped_product(step: Step) -> tuple[State, ...] | None:
    """Rows in the order of their experts, weights, the last row of each expert's run."""
    rows, weights, ends = step.states[:3]
    is_sorted = rows.rows == Shard(0) and rows.order not in (IN_ORDER, ANY_ORDER)
    if not is_sorted or rows.power or weights.rows or weights.sums or not ends.sums:
        return None
    by, counted = _sorted_by(step, rows.order), _counted(step, step.op.inputs[2])
    if by and counted and by != counted:
        return None  # runs of other experts than the rows'
    return (replace(rows, points=None, equal=False),)


def _sorted_by(step: Step, order: str) -> str:
    """The tensor in whose order rows are; empty where another block sorted them."""
    sort = next((op for op in step.walk.program.ops if op.name == order), None)
    return _root(step, sort.inputs[0]) if sort is not None and sort.inputs else ""


def _counted(step: Step, ends: str) -> str:
    """The tensor that ends of runs were counted in; empty where another block did."""
    maker = step.walk.maker.get(_root(step, ends))
    return _root(step, maker.inputs[0]) if maker is not None and maker.inputs else ""


def _root(step: Step, name: str) -> str:
    """A tensor behind others of the same numbers: other shapes, dtypes and orders, run ends."""
    maker = step.walk.maker.get(name)
    while maker is not None and _has_same_numbers(maker):
        if name != maker.outputs[0]:
            break  # indices of a sort
        name = maker.inputs[0]
        maker = step.walk.maker.get(name)
    return name


def _has_same_numbers(op: Op) -> bool:
    packet = op.target.rpartition(".")[0]
    if packet in ("aten.to", "aten.sort", "aten.index", "aten.cumsum"):
        return True
    return family_of(op.target).across.algebra == "rearrangement"


def _by_dim(indices: Arg) -> dict[int, Arg]:
    assert isinstance(indices, tuple)
    return {dim: index for dim, index in enumerate(indices) if isinstance(index, Ref)}


def _dim(step: Step, tensor: Arg, dim: Arg) -> int:
    assert isinstance(tensor, Ref)
    return normal_dim(int(dim), len(step.shape(tensor)))  # type: ignore[arg-type]


def _each(step: Step, tensor: Arg, rows: Shard) -> int:
    assert isinstance(tensor, Ref)
    return step.each(tensor.name, rows.dim)


def _places(numbers: State, of: State, each: int) -> State | None:
    """Numbers of rows as numbers of a tensor's rows, `each` a sample; None if they are others'."""
    if numbers.each != each:
        return None
    order = IN_ORDER if of.order == ANY_ORDER else of.order
    if numbers.rows is None or numbers.points is None or numbers.sums or numbers.power:
        return None
    if numbers.is_number:
        return replace(numbers, order=order, points=order)
    return numbers if numbers.points == order or (of.equal and of.order == ANY_ORDER) else None


def _take(step: Step, source: Arg, indices: Mapping[int, Arg]) -> tuple[State, ...] | None:
    """Rows of a tensor by their numbers, perhaps with places inside each row beside."""
    state = step.of(source)
    if state.rows is None or state.rows.segments > 1 or state.rows.dim not in indices:
        return None
    found = _with_others(step, state, indices, _each(step, source, state.rows))
    if found is None:
        return None
    numbers, dim = found
    assert numbers.rows is not None
    points = numbers.points if state.is_number else state.points
    return (
        State(
            rows=Shard(dim, numbers.rows.segments),
            order=numbers.order,
            points=points,
            each=state.each,
            power=state.power,
        ),
    )


def _put(
    step: Step, target: Arg, indices: Mapping[int, Arg], values: Arg
) -> tuple[State, ...] | None:
    """Rows put to where their numbers say."""
    state, put = step.of(target), step.of(values)
    if state.rows is None or state.rows.segments > 1 or state.rows.dim not in indices:
        return None
    found = _with_others(step, state, indices, _each(step, target, state.rows))
    if found is None:
        return None
    numbers, dim = found
    if put.rows is not None:
        assert isinstance(target, Ref)
        assert isinstance(values, Ref)
        kept = len(step.shape(target)) - len(indices)
        rank = kept + max(len(step.shape(i)) for i in indices.values() if isinstance(i, Ref))
        if put.rows.dim + rank - len(step.shape(values)) != dim:
            return None
    return _placed(state, numbers, put, state.rows, _each(step, target, state.rows))


def _placed(
    target: State, numbers: State, put: State, rows: Shard, each: int
) -> tuple[State, ...] | None:
    """What rows of a state are after they were put to numbers of rows."""
    is_blank = target.equal and target.order == ANY_ORDER
    places = _places(numbers, target, each)
    if places is None or places.points is None or put.sums or put.power or target.power:
        return None
    if put.is_number:
        put = replace(put, order=places.order, points=places.order)
    if put.rows is not None and put.order not in (places.order, ANY_ORDER):
        return None
    if put.points is not None and not is_blank:
        return None
    return (State(rows=rows, order=places.points, points=put.points, each=put.each),)


def _with_others(
    step: Step, state: State, indices: Mapping[int, Arg], each: int
) -> tuple[State, int] | None:
    """The numbers of rows among the indices, and the dim of the result that has their rows.

    The other indices must be of the same rows, in the same order.
    """
    assert state.rows is not None
    dims = sorted(indices)
    numbers = _places(step.of(indices[state.rows.dim]), state, each)
    if numbers is None or numbers.rows is None:
        return None
    ranks = {d: len(step.shape(ref)) for d, ref in indices.items() if isinstance(ref, Ref)}
    common = max(ranks.values())
    lies = common - ranks[state.rows.dim] + numbers.rows.dim
    for dim in dims:
        other = step.of(indices[dim])
        if dim == state.rows.dim or other.rows is None:
            continue
        if other.sums or other.points is not None or common - ranks[dim] + other.rows.dim != lies:
            return None
        if other.order not in (ANY_ORDER, numbers.order):
            return None
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return numbers, lies + (dims[0] if adjacent else 0)
