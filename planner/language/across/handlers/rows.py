"""Ops that make, repeat or take whole rows of samples."""

from __future__ import annotations

from dataclasses import replace

from planner.language.across.state import ANY_ORDER, IN_ORDER, WHOLE, State
from planner.language.across.step import BOUND, Step, handles
from planner.language.graph import Affine
from planner.language.layout.placement import Shard
from planner.language.ops.call import normal_dim


@handles("full", "zeros", "ones", "empty", "scalar_tensor")
@handles("new_full", "new_zeros", "new_ones", "new_empty")
@handles("full_like", "zeros_like", "ones_like", "empty_like")
def _filled(step: Step) -> tuple[State, ...] | None:
    """Equal entries; a number among them may be that of samples."""
    (name,) = step.op.outputs
    value = step.arg(0 if step.packet == "aten.scalar_tensor" else 1, "fill_value", 0)
    if step.packet.startswith("aten.new_"):
        value = step.arg(2, "fill_value", 0)
    if isinstance(value, Affine):
        step.blame("size")
    growing = step.growing(name)
    if not growing:
        return (WHOLE,)
    return (State(rows=Shard(growing[0]), order=ANY_ORDER, equal=True),)


@handles("rand", "randn", "randint", "normal")
def _drawn(step: Step) -> tuple[State, ...] | None:
    """Numbers drawn for each sample."""
    growing = [step.growing(name) for name in step.op.outputs]
    if step.op.inputs or not any(growing):
        return None
    return tuple(State(rows=Shard(dims[0])) for dims in growing)


@handles("repeat", "tile")
def _repeat(step: Step) -> tuple[State, ...] | None:
    """One copy after the other: as often as there are samples, or of all samples."""
    state, (name,) = step.states[0], step.op.outputs
    growing, times = step.growing(name), step.op.args[1]
    assert isinstance(times, tuple)
    if state.sums or len(growing) != 1:
        return None
    (dim,) = growing
    count = times[dim]
    if state.rows is None:
        return (State(rows=Shard(dim), equal=True),)
    if type(count) is not int or state.is_number:
        return None
    rows = Shard(dim, state.rows.segments * count)
    return (replace(state, rows=rows),)


@handles("repeat_interleave")
def _repeat_each(step: Step) -> tuple[State, ...] | None:
    """Each entry as often as there are samples; or each sample so many times."""
    state, repeats = step.states[0], step.arg(1, "repeats")
    rank = len(step.shape(step.op.inputs[0]))
    dim = step.call.arg(2, "dim", 0 if rank == 1 else None)
    if state.rows and type(repeats) is int and dim is not None:
        along = normal_dim(dim, rank)
        # (Numbers of rows would be those of other rows.)
        return (state,) if state.points is None or along != state.rows.dim else None
    if state.rows or state.sums or not isinstance(repeats, Affine):
        return None
    (grown,) = step.growing(step.op.outputs[0])
    size = step.walk.bound[step.op.inputs[0]].shape[grown]
    assert isinstance(size, int)
    return (State(rows=Shard(grown, size), equal=True),)


@handles("slice")
def _slice(step: Step) -> tuple[State, ...] | None:
    """Whole runs of the batch's samples, where their dim holds several; or one row of each."""
    state, call = step.states[0], step.call
    rank = len(call.inputs[0])
    dim = int(call.arg(1, "dim", 0)) % rank if rank else 0
    if state.rows is None or state.rows.dim != dim:
        return None
    size, stride = call.inputs[0][dim], call.arg(4, "step", 1)
    start, stop, _ = slice(call.arg(2, "start"), call.arg(3, "end")).indices(size)
    if len(range(start, stop, stride)) != call.outputs[0][dim]:
        # All rows of the batches of two and three that were captured, and not of larger ones.
        step.blame("mixed")
        return step.anything()
    if call.inputs == call.outputs:
        return None
    run = size // state.rows.segments
    if stride == 1:
        if start % run or stop % run:
            return None
        return (replace(state, rows=Shard(dim, (stop - start) // run)),)
    if start >= stride or stop != size or state.rows.segments > 1 or (size // BOUND) % stride:
        return None
    return (state,) if state.points is None else None


@handles("chunk", "split", "split_with_sizes", "tensor_split")
def _equal_parts(step: Step) -> tuple[State, ...] | None:
    """The runs of the batch's samples, equally many in each of several tensors."""
    state, call = step.states[0], step.call
    dim, count = normal_dim(call.arg(2, "dim", 0), len(call.inputs[0])), len(call.outputs)
    if count < 2 or len(set(call.outputs)) > 1 or state.rows is None or state.rows.dim != dim:
        return None
    runs, rest = divmod(state.rows.segments, count)
    return None if rest else (replace(state, rows=Shard(dim, runs)),) * count


@handles("view_as")
def _like_another(step: Step) -> tuple[State, ...] | None:
    """Of the second tensor only the shape is taken, which the first has room for."""
    step.states[1] = WHOLE
    return None


@handles("embedding_bag", "_embedding_bag")
def _bags(step: Step) -> tuple[State, ...] | None:
    """Table, numbers of all bags in a row, where each bag begins: a row for each bag.

    Where bags begin at numbers that come with the batch, a part's numbers are other samples'.
    """
    table, numbers, begins = step.states[:3]
    starts_in_rows = begins.points == IN_ORDER and begins.order == IN_ORDER
    starts_in_rows &= begins.each == step.each(step.op.inputs[1], 0)
    if not table.is_whole or numbers.rows != Shard(0) or numbers.order or not starts_in_rows:
        if not any(state.rows for state in step.states):
            return None
        step.blame("mixed")
        return step.anything()
    growing = [step.growing(name) for name in step.op.outputs]
    return tuple(State(rows=Shard(dims[0])) if dims else WHOLE for dims in growing)
