"""Copies of tensors, and of their entries, behind each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Affine
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, normal_dim
from planner.language.ops.kernel import saves_nothing
from planner.language.ops.letters import by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import State
from planner.language.ops.samples.step import Across, Step

_PARTIAL = OpSharding(inputs=(P,), outputs=(P,))


def repeat(call: Call) -> Iterator[OpSharding]:
    """Dims that are not repeated can be sharded."""
    offset = len(call.outputs[0]) - len(call.inputs[0])
    whole = call.outputs[0]
    letters = [
        d + offset if size == whole[d + offset] else None for d, size in enumerate(call.inputs[0])
    ]
    out = [d if d in letters else None for d in range(len(whole))]
    yield from by_letters([letters], [out])
    yield _PARTIAL


def repeat_interleave(call: Call) -> Iterator[OpSharding]:
    """Copies of an entry stay neighbours, so even the repeated dim can be sharded."""
    if not isinstance(call.arg(1, "repeats"), int) or call.arg(2, "dim") is None:
        return
    yield from by_letters([range(len(call.inputs[0]))], [range(len(call.outputs[0]))])
    yield _PARTIAL


def repeat_interleave_on_shard(placed: Placed) -> LocalForm:
    """Without the output size of the whole, which is optional."""
    op = placed.op
    return LocalForm((replace(op, kwargs=tuple(k for k in op.kwargs if k[0] != "output_size")),))


# ---------------------------------------------------------------------------------------- samples


def copies(step: Step) -> tuple[State, ...] | None:
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


def copies_of_each(step: Step) -> tuple[State, ...] | None:
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


# ---------------------------------------------------------------------------------------- records

register(
    OpFamily(
        name="repetition",
        targets=aten("repeat tile"),
        shard=(ShardRule(repeat),),
        saved=saves_nothing,
        across=Across(handlers=(copies,)),
    )
)
register(
    OpFamily(
        name="repetition of entries",
        targets=aten("repeat_interleave"),
        shard=(ShardRule(repeat_interleave),),
        local_form=repeat_interleave_on_shard,
        saved=saves_nothing,
        across=Across(sizes_only=True, keeps_numbers=True, handlers=(copies_of_each,)),
    )
)
