"""Rows taken by their numbers, and rows put to where their numbers say.

Indices that are numbers of rows (`State.points`) change the order of rows and no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.language.graph import Arg, Ref
from planner.language.layout.placement import Shard
from planner.language.ops.call import normal_dim
from planner.language.ops.samples.state import ANY_ORDER, IN_ORDER, State
from planner.language.ops.samples.step import Step


def by_dim(indices: Arg) -> dict[int, Arg]:
    """Return the tensors among indices of a tensor's first dims, by dim."""
    assert isinstance(indices, tuple)
    return {dim: index for dim, index in enumerate(indices) if isinstance(index, Ref)}


def dim_of(step: Step, tensor: Arg, dim: Arg) -> int:
    """Return a dim of a tensor, counted from the front."""
    assert isinstance(tensor, Ref)
    return normal_dim(int(dim), len(step.shape(tensor)))  # type: ignore[arg-type]


def rows_each(step: Step, tensor: Arg, rows: Shard) -> int:
    """Return how many rows of a tensor a sample has."""
    assert isinstance(tensor, Ref)
    return step.each(tensor.name, rows.dim)


def places_in(numbers: State, of: State, each: int) -> State | None:
    """Numbers of rows as numbers of a tensor's rows, `each` a sample; None if they are others'."""
    if numbers.each != each:
        return None
    order = IN_ORDER if of.order == ANY_ORDER else of.order
    if numbers.rows is None or numbers.points is None or numbers.sums:
        return None
    if numbers.is_number:
        return replace(numbers, order=order, points=order)
    return numbers if numbers.points == order or (of.equal and of.order == ANY_ORDER) else None


def taken(step: Step, source: Arg, indices: Mapping[int, Arg]) -> tuple[State, ...] | None:
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


def put(
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
    return placed(state, numbers, put, state.rows, rows_each(step, target, state.rows))


def placed(
    target: State, numbers: State, put: State, rows: Shard, each: int
) -> tuple[State, ...] | None:
    """What rows of a state are after they were put to numbers of rows."""
    is_blank = target.equal and target.order == ANY_ORDER
    places = places_in(numbers, target, each)
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
    numbers = places_in(
        step.of(indices[state.rows.dim]), state, rows_each(step, tensor, state.rows)
    )
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
