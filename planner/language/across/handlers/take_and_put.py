"""Rows taken by their numbers, and rows put to where their numbers say.

Indices that are numbers of rows (`State.points`) change the order of rows and no row, as does a
product of each run of rows with its own expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.language.across.state import ANY_ORDER, IN_ORDER, State
from planner.language.across.step import Step, handles
from planner.language.graph import Arg, Op, Ref
from planner.language.layout.placement import Shard
from planner.language.ops.call import normal_dim
from planner.language.ops.record import family_of


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


@handles("take_along_dim")
def _take_along(step: Step) -> tuple[State, ...] | None:
    """Tensor, a number for each entry of the result: places inside each row, or of rows."""
    source, index = step.states[:2]
    if source.rows is None:
        return None
    dim, rank = step.arg(2, "dim"), len(step.shape(step.op.inputs[0]))
    inside = dim is not None and normal_dim(dim, rank) != source.rows.dim
    if inside and (index.rows, index.order) == (source.rows, source.order) and not index.sums:
        return (replace(source, equal=False),) if index.points is None else None
    return _mixed(step)


@handles("take", "index_reduce", "segment_reduce")
def _by_any_numbers(step: Step) -> tuple[State, ...] | None:
    """Entries or rows by numbers, or by where runs of rows begin: of whichever samples they are."""
    rows = step.states[0].rows
    if rows is None:
        return None
    if (
        step.packet == "aten.index_reduce"
        and _dim(step, step.op.args[0], step.op.args[1]) != rows.dim
    ):
        return None
    return _mixed(step)


def _mixed(step: Step) -> tuple[State, ...]:
    step.blame("mixed")
    return step.anything()


@handles(
    "_grouped_mm",
    "transformers.grouped_mm_fallback",
    "planner.grouped_mm",
    "planner.product_of_runs",
    "planner.bias_of_runs",
)
def _of_runs(step: Step) -> tuple[State, ...] | None:
    """Rows in the order of their experts, matrices or biases, the last row of each expert's run."""
    rows, weights, ends = step.states[:3]
    is_sorted = rows.rows == Shard(0) and rows.order not in (IN_ORDER, ANY_ORDER)
    if not is_sorted or weights.rows or weights.sums or not ends.sums:
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
    if numbers.rows is None or numbers.points is None or numbers.sums:
        return None
    if numbers.is_number:
        return replace(numbers, order=order, points=order)
    return numbers if numbers.points == order or (of.equal and of.order == ANY_ORDER) else None


def _take(step: Step, source: Arg, indices: Mapping[int, Arg]) -> tuple[State, ...] | None:
    """Rows of a tensor by their numbers, perhaps with places inside each row beside."""
    state = step.of(source)
    found = _numbers(step, source, indices, in_runs=True)
    if found is None:
        return None
    numbers, dim = found
    assert numbers.rows is not None
    assert state.rows is not None
    points = numbers.points if state.is_number else state.points
    return (
        State(
            rows=Shard(dim, max(numbers.rows.segments, state.rows.segments)),
            order=numbers.order,
            points=points,
            each=state.each,
        ),
    )


def _put(
    step: Step, target: Arg, indices: Mapping[int, Arg], values: Arg
) -> tuple[State, ...] | None:
    """Rows put to where their numbers say."""
    found = _numbers(step, target, indices)
    if found is None:
        return None
    state, put = step.of(target), step.of(values)
    numbers, dim = found
    assert state.rows is not None
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
    if places is None or places.points is None or put.sums:
        return None
    if put.is_number:
        put = replace(put, order=places.order, points=places.order)
    if put.rows is not None and put.order not in (places.order, ANY_ORDER):
        return None
    if put.points is not None and not is_blank:
        return None
    return (State(rows=rows, order=places.points, points=put.points, each=put.each),)


def _numbers(
    step: Step, tensor: Arg, indices: Mapping[int, Arg], *, in_runs: bool = False
) -> tuple[State, int] | None:
    """The numbers of a tensor's rows among indices of its dims, and the dim of the result that has
    their rows; None where samples do not lie along one run of an indexed dim, or with `in_runs`
    along several of which each row is taken where it is.

    The other indices must be of the same rows, in the same order.
    """
    state = step.of(tensor)
    if state.rows is None or state.rows.dim not in indices:
        return None
    own = step.of(indices[state.rows.dim])
    if state.rows.segments > 1 and not (in_runs and own.is_number):
        return None
    dims = sorted(indices)
    numbers = _places(step.of(indices[state.rows.dim]), state, _each(step, tensor, state.rows))
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
        if state.rows.segments > 1 and other.rows.segments != state.rows.segments:
            return None
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return numbers, lies + (dims[0] if adjacent else 0)
