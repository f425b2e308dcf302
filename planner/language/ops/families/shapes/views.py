"""Views of the same elements: reshape, permute, expand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod

from planner.language.graph import Op
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, R, Shape, normal_dim, normal_dims
from planner.language.ops.kernel import KernelCall, View, same_memory, saves_nothing
from planner.language.ops.letters import Letters, broadcast, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, packet_of, register
from planner.language.ops.samples.state import WHOLE, State
from planner.language.ops.samples.step import BY_RULES, Across, Step
from planner.language.ops.strides import reshaped_strides

_PARTIAL = OpSharding(inputs=(P,), outputs=(P,))


def dim_groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of dims of two shapes that hold the same elements, in order.

    ``(6, 4, 5), (3, 2, 20)`` gives ``[0], [0, 1]`` and ``[1, 2], [2]``.
    """
    i = j = 0
    while i < len(source) or j < len(target):
        left: list[int] = []
        right: list[int] = []
        size_left = size_right = 1
        while True:
            if size_left == size_right and left and right:
                break
            # The side that holds fewer elements takes its next dim.
            if size_left <= size_right and i < len(source):
                left.append(i)
                size_left *= source[i]
                i += 1
            elif j < len(target):
                right.append(j)
                size_right *= target[j]
                j += 1
            elif i < len(source):
                left.append(i)
                size_left *= source[i]
                i += 1
            else:
                break
        yield left, right


def reshape_placements(
    source: Shape, target: Shape, axis_size: int, segments: Collection[int] = ()
) -> Iterator[tuple[Shard, Shard]]:
    """Yield (placement before, placement after) of every way to shard a reshape.

    A group of dims holds the same elements before and after, so it is one flat dim seen
    twice. Sharding dim i of a group cuts the flat dim in as many segments as the dims in
    front of i have entries; the same cut must then be a sharding of a dim on the other
    side. The leading dims give one segment: a plain shard on both sides. Each cut is also
    offered in `segments` more.
    """
    if prod(source) == 0:
        return
    # What a cut of a dim in a group makes of the flat dim, on either side, is tried on both.
    for left, right in dim_groups(source, target):
        cuts = {_segments_in_front(left, source, d) for d in left}
        cuts |= {_segments_in_front(right, target, d) for d in right}
        for count in sorted({cut * more for cut in cuts for more in (1, *segments)}):
            before = _dim_at(left, source, count, axis_size)
            after = _dim_at(right, target, count, axis_size)
            if before is not None and after is not None:
                yield before, after


def _segments_in_front(group: list[int], shape: Shape, dim: int) -> int:
    """Return the segments of the flattened group that sharding one of its dims makes."""
    return prod(shape[d] for d in group if d < dim)


def _dim_at(group: list[int], shape: Shape, count: int, axis_size: int) -> Shard | None:
    """Return the sharding of one dim of a group that cuts the flat dim in `count` segments."""
    # `count` segments of the flat dim are count / (entries in front) of this one.
    for dim in reversed(group):
        segments, rest = divmod(count, _segments_in_front(group, shape, dim))
        fits = segments > 0 and rest == 0 and shape[dim] % (segments * axis_size) == 0
        if fits and shape[dim] > 1:
            return Shard(dim, segments)
    return None


def reshape(call: Call) -> Iterator[OpSharding]:
    """The same elements under other sizes; see `reshape_placements`."""
    rest = (R,) * (len(call.inputs) - 1)
    for before, after in reshape_placements(
        call.inputs[0], call.outputs[0], call.axis_size, call.segments
    ):
        yield OpSharding(inputs=(before, *rest), outputs=(after,))
    if not rest:
        yield _PARTIAL


def reshape_on_shard(placed: Placed) -> LocalForm:
    """The same reshape with the sizes of the shard.

    As `reshape`, since a shard need not be contiguous where the whole was; and since
    `squeeze` would take a sharded dim whose local size is one.
    """
    return placed.with_args(placed.op.args[0], placed.local_output(), target="aten.reshape.default")


def permute(call: Call) -> Iterator[OpSharding]:
    """The dims in another order."""
    rank = len(call.inputs[0])
    order = dim_order(call.op, rank)
    yield from by_letters([range(rank)], [order])
    yield _PARTIAL


def dim_order(op: Op, rank: int) -> list[int]:
    """Return the input's dims in the order in which the output has them."""
    packet, args = packet_of(op.target), op.args
    order = list(range(rank))
    if packet == "permute":
        return list(normal_dims(args[1] if len(args) > 1 else dict(op.kwargs)["dims"], rank))
    if packet == "numpy_T":
        return order[::-1]
    if packet == "movedim":
        source, target = normal_dims(args[1], rank), normal_dims(args[2], rank)
        rest = iter(d for d in order if d not in source)
        placed = dict(zip(target, source, strict=True))
        return [placed[d] if d in placed else next(rest) for d in order]
    if packet in ("t", "mT", "adjoint"):
        a, b = (rank - 2, rank - 1) if rank > 1 else (0, 0)
    else:
        a, b = (normal_dim(int(d), rank) for d in args[1:3])  # type: ignore[arg-type]
    if rank:
        order[a], order[b] = order[b], order[a]
    return order


def expand(call: Call) -> Iterator[OpSharding]:
    """A stretched dim may be sharded: each rank stretches less."""
    shape, out_shape = call.inputs[0], call.outputs[0]
    rest = [broadcast(s, out_shape) for s in call.inputs[1:]]
    yield from by_letters([broadcast(shape, out_shape), *rest], [range(len(out_shape))])
    if not rest:
        yield _PARTIAL


def expand_on_shard(placed: Placed) -> LocalForm:
    """The same expand to the sizes of the shard."""
    return placed.with_args(placed.op.args[0], placed.local_output(), target="aten.expand.default")


def broadcast_together(call: Call) -> Iterator[OpSharding]:
    """Stretches several tensors to one shape; a dim that one of them lacks is stretched less."""
    whole = call.outputs[0]
    letters = [broadcast(shape, whole) for shape in call.inputs]
    out = [d if any(d in tensor for tensor in letters) else None for d in range(len(whole))]
    yield from by_letters(letters, [out] * len(call.outputs))


def complex_pairs(call: Call) -> Iterator[OpSharding]:
    """Pairs of numbers in the last dim, or complex ones without it."""
    letters: Letters = range(min(len(call.inputs[0]), len(call.outputs[0])))
    sides = [
        letters if len(shape) == len(letters) else [*letters, None]
        for shape in (call.inputs[0], call.outputs[0])
    ]
    yield from by_letters(sides[:1], sides[1:])
    yield OpSharding(inputs=(P,), outputs=(P,))


# ------------------------------------------------------------------------------------- strides


def _reshaped(call: KernelCall, position: int) -> View | None:
    """A view where strides allow it, else a copy."""
    source, output = call.op.inputs[0], call.op.outputs[0]
    strides = reshaped_strides(call.shape(source), call.strides[source], call.shape(output))
    return None if strides is None else View(source, strides)


def _permuted(call: KernelCall, position: int) -> View | None:
    source = call.op.inputs[0]
    old = call.strides[source]
    return View(source, tuple(old[dim] for dim in dim_order(call.op, len(old))))


def _expanded(call: KernelCall, position: int) -> View | None:
    """A stretched dim has stride zero: all its entries are one."""
    names = call.op.inputs
    source = names[position] if len(call.op.outputs) > 1 else names[0]
    shape, whole = call.shape(source), call.shape(call.op.outputs[position])
    lead = (0,) * (len(whole) - len(shape))
    kept = zip(shape, whole[len(lead) :], call.strides[source], strict=True)
    return View(source, lead + tuple(0 if was != now else step for was, now, step in kept))


def _as_pairs(call: KernelCall, position: int) -> View | None:
    """Strides count numbers of the tensor's own dtype: a complex one is two real ones."""
    source, output = call.op.inputs[0], call.op.outputs[0]
    old = call.strides[source]
    if len(call.shape(output)) > len(old):
        return View(source, (*(2 * step for step in old), 1))
    return View(source, tuple(step // 2 for step in old[:-1]))


# ---------------------------------------------------------------------------------------- records

VIEW = OpFamily(
    name="view",
    moves_nothing=True,
    view=same_memory,
    saved=saves_nothing,
    across=Across(algebra="rearrangement"),
)
"""What all views have in common. `reshape` may copy when its input is not contiguous; a copy then
costs little time beside the op that made it so."""

_RESHAPE = replace(
    VIEW,
    name="reshape",
    targets=(
        "aten.view.default",
        *aten("_unsafe_view reshape flatten unflatten squeeze unsqueeze"),
    ),
    shard=(ShardRule(reshape, contiguous=True),),
    local_form=reshape_on_shard,
    view=_reshaped,
    reshapes=True,
    across=Across(algebra="rearrangement", in_runs=True, sizes_only=True),
)
register(_RESHAPE)


def _like_another(step: Step) -> tuple[State, ...] | None:
    """Of the second tensor only the shape is taken, which the first has room for."""
    step.states[1] = WHOLE
    return None


register(
    replace(
        _RESHAPE,
        name="reshape like another tensor",
        targets=aten("view_as"),
        across=replace(_RESHAPE.across, handlers=(_like_another,)),
    )
)
register(
    replace(
        _RESHAPE,
        name="reshape without sharding rule",
        targets=("aten.view.dtype", *aten("reshape_as ravel")),
        shard=(),
        local_form=None,
    )
)
register(
    replace(
        VIEW,
        name="permutation of dims",
        targets=aten("transpose permute t swapaxes swapdims movedim numpy_T mT adjoint"),
        shard=(ShardRule(permute),),
        view=_permuted,
        dim_order=dim_order,
    )
)
register(
    replace(
        VIEW,
        name="stretch",
        targets=aten("expand expand_as broadcast_to"),
        shard=(ShardRule(expand),),
        local_form=expand_on_shard,
        view=_expanded,
    )
)
register(
    replace(
        VIEW,
        name="stretch of several tensors",
        targets=aten("broadcast_tensors"),
        shard=(ShardRule(broadcast_together),),
        view=_expanded,
        across=BY_RULES,
    )
)
register(replace(VIEW, name="lift", targets=aten("lift_fresh lift_fresh_copy"), across=BY_RULES))
register(
    replace(
        VIEW,
        name="complex numbers as pairs",
        targets=aten("view_as_real view_as_complex"),
        view=_as_pairs,
        across=Across(rule=complex_pairs),
    )
)
