"""Gather, scatter and indexing: dims that are not indexed can be sharded.

Indices count from the start of a dim, so an indexed dim stays whole; the dims of the
indices themselves can be sharded when they only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Ref
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, P, R, Shape, normal_dim
from planner.language.ops.families.shapes.rows_by_number import (
    by_dim,
    dim_of,
    placed,
    places_in,
    put,
    rows_each,
    taken,
)
from planner.language.ops.kernel import (
    KernelCall,
    Saved,
    saves_inputs,
    saves_nothing,
    saves_other_inputs,
)
from planner.language.ops.letters import Letters, broadcast, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import State
from planner.language.ops.samples.step import BY_RULES, Across, Step


def along_dim(call: Call) -> Iterator[OpSharding]:
    """Tensor, dim, index and perhaps source: the other dims go together where sizes agree."""
    rank = len(call.inputs[0])
    dim = normal_dim(int(call.op.args[1]), rank)  # type: ignore[arg-type]
    shapes = (*call.inputs, *call.outputs)
    letters: Letters = [
        d if d != dim and len({shape[d] for shape in shapes}) == 1 else None for d in range(rank)
    ]
    if call.packet == "aten.gather":
        # Entries along the dim are looked up one by one: the index can be sharded there.
        index: Letters = ["i" if d == dim else letter for d, letter in enumerate(letters)]
        yield from by_letters([letters, index], [index])
        yield OpSharding(inputs=(P, R), outputs=(P,))
        return
    yield from by_letters([letters] * len(call.inputs), [letters])
    if call.packet == "aten.scatter_add":
        yield OpSharding(inputs=(P, R, P), outputs=(P,))


def index_select(call: Call) -> Iterator[OpSharding]:
    """Tensor, dim, index [k]."""
    rank = len(call.inputs[0])
    dim = normal_dim(int(call.op.args[1]), rank)  # type: ignore[arg-type]
    letters: Letters = [None if d == dim else d for d in range(rank)]
    out: Letters = ["i" if d == dim else d for d in range(rank)]
    yield from by_letters([letters, ["i"]], [out])
    yield OpSharding(inputs=(P, R), outputs=(P,))


def index_write(call: Call) -> Iterator[OpSharding]:
    """Tensor, dim, index [k] and source."""
    rank = len(call.inputs[0])
    dim = normal_dim(int(call.op.args[1]), rank)  # type: ignore[arg-type]
    letters: Letters = [None if d == dim else d for d in range(rank)]
    rest: list[Letters] = [letters if len(s) == rank else [] for s in call.inputs[2:]]
    yield from by_letters([letters, [None], *rest], [letters])


def part_scatter(call: Call) -> Iterator[OpSharding]:
    """Tensor, source, dim: the tensor with a part along one dim replaced."""
    rank = len(call.inputs[0])
    dim = normal_dim(call.arg(2, "dim", 0), rank)
    letters: Letters = [None if d == dim else d for d in range(rank)]
    narrow = call.packet == "aten.select_scatter"
    source = [letter for letter in letters if letter is not None] if narrow else letters
    yield from by_letters([letters, source], [letters])
    yield OpSharding(inputs=(P, P), outputs=(P,))


def index(call: Call) -> Iterator[OpSharding]:
    """Tensor and an index (or None) for each of its leading dims, as in x[:, i, j]."""
    found = _indexed(call)
    if found is None:
        return
    letters, kept, index_shape, where = found
    new: Letters = [f"i{d}" for d in range(len(index_shape))]
    out: Letters = [*kept[:where], *new, *kept[where:]]
    indices = [_aligned(shape, index_shape, new) for shape in call.inputs[1:]]
    yield from by_letters([letters, *indices], [out])
    yield OpSharding(inputs=(P, *(R,) * len(indices)), outputs=(P,))


def index_put(call: Call) -> Iterator[OpSharding]:
    """Tensor, indices, values: x[:, i, j] = values. Indexed dims and indices stay whole."""
    found = _indexed(call)
    if found is None:
        return
    letters, kept, index_shape, where = found
    target: Letters = [*kept[:where], *[None] * len(index_shape), *kept[where:]]
    sizes = [call.inputs[0][d] for d in kept]
    target_shape = (*sizes[:where], *index_shape, *sizes[where:])
    values = _aligned(call.inputs[-1], target_shape, target)
    count = len(call.inputs) - 2
    whole: list[Letters] = [[None] * len(shape) for shape in call.inputs[1 : 1 + count]]
    yield from by_letters([letters, *whole, values], [letters])


def _indexed(call: Call) -> tuple[list[int | None], list[int], Shape, int] | None:
    """Return what an op indexes: letters of the tensor's dims, None for the indexed ones; the
    others; the indices' common shape; and where it goes in the output.

    None for masks, whose result has a size that depends on values.
    """
    indices = call.op.args[1]
    assert isinstance(indices, tuple)
    refs = [(d, ref) for d, ref in enumerate(indices) if isinstance(ref, Ref)]
    if not refs or any(call.tensor[ref.name].dtype in ("bool", "uint8") for _, ref in refs):
        return None
    dims = [d for d, _ in refs]
    shapes = [call.shape(ref) for _, ref in refs]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    common = tuple(max(sizes) for sizes in zip(*padded, strict=True)) if rank else ()
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    kept = [d for d in range(len(call.inputs[0])) if d not in dims]
    letters = [d if d in kept else None for d in range(len(call.inputs[0]))]
    return letters, kept, common, dims[0] if adjacent else 0


def _aligned(shape: Shape, whole: Shape, letters: Letters) -> Letters:
    return [None if i is None else letters[i] for i in broadcast(shape, whole)]


def one_hot(call: Call) -> Iterator[OpSharding]:
    """Indices […] to […, classes]."""
    letters: Letters = list(range(len(call.inputs[0])))
    yield from by_letters([letters], [[*letters, None]])


# --------------------------------------------------------------------------- saved for backward


def _index_alone(call: KernelCall) -> Saved:
    """Tensor, index, what is written: the index alone."""
    return Saved(tensors=call.op.inputs[1:2])


def _indices_written_to(call: KernelCall) -> Saved:
    """Tensor, indices, values: the indices."""
    return Saved(tensors=call.op.inputs[1:-1])


# ---------------------------------------------------------------------------------------- samples


def _index(step: Step) -> tuple[State, ...] | None:
    """Tensor, numbers for some of its dims."""
    return taken(step, step.op.args[0], by_dim(step.op.args[1]))


def _index_select(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, numbers."""
    source, dim, index = step.op.args[:3]
    return taken(step, source, {dim_of(step, source, dim): index})


def _index_put(step: Step) -> tuple[State, ...] | None:
    """Tensor, numbers for some of its dims, rows to put there."""
    target, indices, values = step.op.args[:3]
    return put(step, target, by_dim(indices), values)


def _index_add(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, numbers, rows to put there."""
    target, dim, index, values = step.op.args[:4]
    return put(step, target, {dim_of(step, target, dim): index}, values)


def _gather(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, a number for each entry of the result."""
    source, dim, index = step.op.args[:3]
    state = step.of(source)
    at = Shard(dim_of(step, source, dim))
    numbers = places_in(step.of(index), state, rows_each(step, source, at))
    if state.rows != at or numbers is None:
        return None
    return (
        (replace(state, order=numbers.order, equal=False),) if numbers.rows == state.rows else None
    )


def _scatter(step: Step) -> tuple[State, ...] | None:
    """Tensor, dim, a number for each entry of the source."""
    target, dim, index, values = step.op.args[:4]
    at = Shard(dim_of(step, target, dim))
    if step.of(target).rows != at or step.of(index).rows != at:
        return None
    each = rows_each(step, target, at)
    return placed(step.of(target), step.of(index), step.of(values), at, each)


# ---------------------------------------------------------------------------------------- records

register(
    OpFamily(
        name="gather",
        targets=aten("gather"),
        shard=(ShardRule(along_dim),),
        saved=saves_inputs(0, 1),  # the tensor too: its gradient may be sparse
        across=Across(handlers=(_gather,)),
    )
)
_CHOICE = OpFamily(
    name="indexing",
    targets=aten("index"),
    shard=(ShardRule(index),),
    saved=saves_other_inputs,
    across=Across(handlers=(_index,)),
)
"""Reads by indices, which are all that its gradient needs."""

register(_CHOICE)
register(
    replace(
        _CHOICE,
        name="chosen entries of a dim",
        targets=aten("index_select"),
        shard=(ShardRule(index_select),),
        across=Across(sizes_only=True, handlers=(_index_select,)),
    )
)

_SCATTER = OpFamily(
    name="scatter",
    targets=aten("scatter scatter_add"),
    shard=(ShardRule(along_dim),),
    saved=_index_alone,
    across=Across(handlers=(_scatter,)),
)
"""Writes by indices."""

register(_SCATTER)
register(
    replace(
        _SCATTER,
        name="scatter with a reduction",
        targets=aten("scatter_reduce"),
        saved=lambda call: Saved(tensors=(*call.op.inputs, *call.op.outputs)),
        across=BY_RULES,
    )
)
_WRITTEN = replace(
    _SCATTER,
    name="rows of a dim written",
    targets=aten("index_add index_copy"),
    shard=(ShardRule(index_write),),
    saved=saves_other_inputs,  # the source for its shape
    across=Across(handlers=(_index_add,)),
)
register(_WRITTEN)
register(
    replace(
        _WRITTEN,
        name="entries of a dim written",
        targets=aten("index_fill"),
        across=BY_RULES,
    )
)
register(
    replace(
        _SCATTER,
        name="a part written",
        targets=aten("slice_scatter select_scatter"),
        shard=(ShardRule(part_scatter),),
        saved=saves_nothing,
        across=Across(sizes_only=True),
    )
)
register(
    replace(
        _SCATTER,
        name="indexed entries written",
        targets=aten("index_put _unsafe_index_put"),
        shard=(ShardRule(index_put),),
        saved=_indices_written_to,
        across=Across(handlers=(_index_put,)),
    )
)
register(
    OpFamily(
        name="one-hot vectors",
        targets=aten("one_hot"),
        shard=(ShardRule(one_hot),),
        across=Across(sizes_only=True),
    )
)
