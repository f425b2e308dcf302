"""Parts of tensors: slice, split, join and pad."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, normal_dim
from planner.language.ops.families.entries.copies import with_a_linear_input
from planner.language.ops.families.products.linear_algebra import of_matrices
from planner.language.ops.families.shapes.views import VIEW
from planner.language.ops.kernel import KernelCall, View, saves_nothing
from planner.language.ops.letters import Letters, by_letters, same_dims
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.state import State
from planner.language.ops.samples.step import BOUND, BY_RULES, Across, Step

_PARTIAL = OpSharding(inputs=(P,), outputs=(P,))


def take_along(call: Call) -> Iterator[OpSharding]:
    """Takes a part along one dim, which stays whole; the others can be sharded."""
    rank = len(call.inputs[0])
    dim = normal_dim(call.arg(1, "dim", 0), rank)
    letters: Letters = [None if d == dim else d for d in range(rank)]
    out = letters
    if call.packet == "aten.select":
        out = [d for d in range(rank) if d != dim]
    elif call.packet == "aten.unfold":
        out = [*letters, None]
    elif call.inputs == call.outputs and call.arg(4, "step", 1) == 1:
        letters = out = list(range(rank))  # the whole of it
    yield from by_letters([letters], [out])
    yield _PARTIAL


def split(call: Call) -> Iterator[OpSharding]:
    """Cuts one dim, which stays whole, into several outputs."""
    rank = len(call.inputs[0])
    unbinds = call.packet == "aten.unbind"
    dim = normal_dim(call.arg(1 if unbinds else 2, "dim", 0), rank)
    letters = [None if d == dim else d for d in range(rank)]
    out = [d for d in range(rank) if d != dim] if unbinds else letters
    yield from by_letters([letters], [out] * len(call.outputs))
    yield OpSharding(inputs=(P,), outputs=(P,) * len(call.outputs))
    count = len(call.outputs)
    if not unbinds and count > 1 and len(set(call.outputs)) == 1:
        # Equal parts are segments: a rank that holds its piece of each part cuts them apart.
        yield OpSharding(inputs=(Shard(dim, count),), outputs=(Shard(dim),) * count)


def split_on_shard(placed: Placed) -> LocalForm:
    """With segments divided, parts are as large as a rank's piece of one."""
    op, call = placed.op, placed.call
    dim = normal_dim(call.arg(2, "dim", 0), len(call.inputs[0]))
    cut = placed.sharding.outputs[0]
    if not isinstance(cut, Shard) or cut.dim != dim:
        return LocalForm((op,))
    part = placed.local_output()[dim]
    sizes = part if isinstance(op.args[1], int) else (part,) * len(op.outputs)
    return LocalForm((replace(op, args=(op.args[0], sizes, *op.args[2:])),))


def join(call: Call) -> Iterator[OpSharding]:
    """Puts tensors side by side along one dim, which stays whole."""
    rank = len(call.outputs[0])
    dim = normal_dim(call.arg(1, "dim", 0), rank)
    out = [None if d == dim else d for d in range(rank)]
    letters = [d for d in out if d is not None] if call.packet == "aten.stack" else out
    count = len(call.inputs)
    yield from by_letters([letters] * count, [out])
    yield OpSharding(inputs=(P,) * count, outputs=(P,))
    if call.packet != "aten.stack" and count > 1 and len(set(call.inputs)) == 1:
        # Equal tensors cut alike: the result has a piece of each, so `count` segments.
        yield OpSharding(inputs=(Shard(dim),) * count, outputs=(Shard(dim, count),))


def pad(call: Call) -> Iterator[OpSharding]:
    """Dims that get no padding can be sharded."""
    sizes = call.op.args[1]
    assert isinstance(sizes, tuple)
    rank = len(call.inputs[0])
    # Sizes come in pairs (before, behind), of the last dim first.
    padded = {rank - 1 - i // 2 for i, size in enumerate(sizes) if size != 0}
    yield from same_dims(call, fixed=padded)
    constant = (
        call.packet == "aten.constant_pad_nd" or call.arg(2, "mode", "constant") == "constant"
    )
    value = call.arg(2 if call.packet == "aten.constant_pad_nd" else 3, "value", 0)
    if not constant or not value:
        yield _PARTIAL


# ------------------------------------------------------------------------------------- strides


def _dim(call: KernelCall) -> int:
    return normal_dim(int(call.arg(1, "dim", 0)), len(call.shape(call.op.inputs[0])))


def _every_so_many(call: KernelCall, position: int) -> View | None:
    """A slice: its dim has the stride of the step."""
    source = call.op.inputs[0]
    old, dim = call.strides[source], _dim(call)
    step = int(call.op.args[4]) if len(call.op.args) > 4 else 1  # type: ignore[arg-type]
    return View(source, (*old[:dim], old[dim] * step, *old[dim + 1 :]))


def _without_dim(call: KernelCall, position: int) -> View | None:
    """One entry of a dim, which vanishes."""
    source = call.op.inputs[0]
    old, dim = call.strides[source], _dim(call)
    return View(source, old[:dim] + old[dim + 1 :])


def _windows(call: KernelCall, position: int) -> View | None:
    """Windows along a dim, which overlap in memory: a step from one to the next, then inside."""
    source = call.op.inputs[0]
    old, dim = call.strides[source], _dim(call)
    step = int(call.arg(3, "step"))
    return View(source, (*old[:dim], old[dim] * step, *old[dim + 1 :], old[dim]))


def _diagonal(call: KernelCall, position: int) -> View | None:
    """One step along both dims of a diagonal at once, in the last dim."""
    source = call.op.inputs[0]
    old = call.strides[source]
    pair = {normal_dim(int(call.arg(i, f"dim{i - 1}", i - 2)), len(old)) for i in (2, 3)}
    rest = tuple(step for dim, step in enumerate(old) if dim not in pair)
    return View(source, (*rest, sum(old[dim] for dim in pair)))


def _real_part(call: KernelCall, position: int) -> View | None:
    """Every second number of a complex tensor; a real one itself."""
    source = call.op.inputs[0]
    step = 2 if call.tensor[source].dtype.startswith("complex") else 1
    return View(source, tuple(step * stride for stride in call.strides[source]))


def _given_strides(call: KernelCall, position: int) -> View | None:
    """The op's own argument."""
    return View(call.op.inputs[0], tuple(call.arg(2, "stride")))


# ---------------------------------------------------------------------------------------- samples


def runs_of_samples(step: Step) -> tuple[State, ...] | None:
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


def equal_parts(step: Step) -> tuple[State, ...] | None:
    """The runs of the batch's samples, equally many in each of several tensors."""
    state, call = step.states[0], step.call
    dim, count = normal_dim(call.arg(2, "dim", 0), len(call.inputs[0])), len(call.outputs)
    if count < 2 or len(set(call.outputs)) > 1 or state.rows is None or state.rows.dim != dim:
        return None
    runs, rest = divmod(state.rows.segments, count)
    return None if rest else (replace(state, rows=Shard(dim, runs)),) * count


# ---------------------------------------------------------------------------------------- records

_PART = replace(
    VIEW,
    name="part",
    targets=aten("narrow"),
    shard=(ShardRule(take_along),),
    across=Across(sizes_only=True),
)
register(_PART)
register(
    replace(
        _PART,
        name="slice",
        targets=aten("slice"),
        view=_every_so_many,
        across=Across(sizes_only=True, handlers=(runs_of_samples,)),
    )
)
register(replace(_PART, name="entry of a dim", targets=aten("select"), view=_without_dim))
register(replace(_PART, name="windows", targets=aten("unfold"), view=_windows))
register(
    replace(
        _PART,
        name="diagonal",
        targets=aten("diagonal"),
        shard=(),
        view=_diagonal,
        across=Across(rule=of_matrices, sizes_only=True),
    )
)
register(
    replace(_PART, name="any strides", targets=aten("as_strided"), shard=(), view=_given_strides)
)
register(
    replace(
        _PART,
        name="real part",
        targets=aten("real"),
        shard=(),
        view=_real_part,
        across=Across(rule=with_a_linear_input),
    )
)

_SPLIT = replace(
    _PART,
    name="split in runs",
    targets=aten("split unsafe_split split_with_sizes"),
    shard=(ShardRule(split),),
    local_form=split_on_shard,
    across=Across(in_runs=True, sizes_only=True, handlers=(equal_parts,)),
)
register(_SPLIT)
register(
    replace(
        _SPLIT,
        name="split in a number of runs",
        targets=aten("chunk unsafe_chunk"),
        local_form=None,
    )
)
register(
    replace(
        _SPLIT,
        name="split at places",
        targets=aten("tensor_split"),
        local_form=None,
        across=Across(sizes_only=True, handlers=(equal_parts,)),
    )
)
register(
    replace(
        _SPLIT,
        name="split in entries",
        targets=aten("unbind"),
        local_form=None,
        view=_without_dim,
        across=BY_RULES,
    )
)

_JOIN = OpFamily(
    name="join",
    targets=aten("cat concat"),
    shard=(ShardRule(join),),
    saved=saves_nothing,
    across=Across(algebra="addition", in_runs=True),
)
register(_JOIN)
register(
    replace(
        _JOIN,
        name="join along a new dim",
        targets=aten("stack"),
        across=Across(algebra="addition"),
    )
)
register(
    OpFamily(
        name="padding",
        targets=aten("pad constant_pad_nd"),
        shard=(ShardRule(pad),),
        saved=saves_nothing,
    )
)
