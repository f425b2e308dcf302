"""Ops that arrange the same elements differently: reshape, permute, expand, slice, join."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod

from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, P, R, Shape, normal_dim, normal_dims
from planner.ops.letters import Letters, broadcast, by_letters, same_dims
from planner.ops.registry import LocalForm, Placed, local_form, rule

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
    for dim in reversed(group):
        segments, rest = divmod(count, _segments_in_front(group, shape, dim))
        fits = segments > 0 and rest == 0 and shape[dim] % (segments * axis_size) == 0
        if fits and shape[dim] > 1:
            return Shard(dim, segments)
    return None


_RESHAPES = (
    "aten.view.default",
    "aten._unsafe_view",
    "aten.reshape",
    "aten.flatten",
    "aten.unflatten",
    "aten.squeeze",
    "aten.unsqueeze",
    "aten.view_as",
)


@rule(*_RESHAPES, contiguous=True)
def reshape(call: Call) -> Iterator[OpSharding]:
    """The same elements under other sizes; see `reshape_placements`."""
    rest = (R,) * (len(call.inputs) - 1)
    for before, after in reshape_placements(
        call.inputs[0], call.outputs[0], call.axis_size, call.segments
    ):
        yield OpSharding(inputs=(before, *rest), outputs=(after,))
    if not rest:
        yield _PARTIAL


@local_form(*_RESHAPES)
def reshape_on_shard(placed: Placed) -> LocalForm:
    """The same reshape with the sizes of the shard.

    As `reshape`, since a shard need not be contiguous where the whole was; and since
    `squeeze` would take a sharded dim whose local size is one.
    """
    return placed.with_args(placed.op.args[0], placed.local_output(), target="aten.reshape.default")


@rule(
    "aten.transpose",
    "aten.permute",
    "aten.t",
    "aten.swapaxes",
    "aten.swapdims",
    "aten.movedim",
    "aten.numpy_T",
    "aten.mT",
    "aten.adjoint",
)
def permute(call: Call) -> Iterator[OpSharding]:
    """The dims in another order."""
    rank = len(call.inputs[0])
    order = _order(call, rank)
    yield from by_letters([range(rank)], [order])
    yield _PARTIAL


def _order(call: Call, rank: int) -> list[int]:
    packet = call.packet.removeprefix("aten.")
    order = list(range(rank))
    if packet == "permute":
        return list(normal_dims(call.arg(1, "dims"), rank))
    if packet == "numpy_T":
        return order[::-1]
    if packet == "movedim":
        source = normal_dims(call.op.args[1], rank)
        target = normal_dims(call.op.args[2], rank)
        rest = iter(d for d in order if d not in source)
        placed = dict(zip(target, source, strict=True))
        return [placed[d] if d in placed else next(rest) for d in order]
    if packet in ("t", "mT", "adjoint"):
        a, b = (rank - 2, rank - 1) if rank > 1 else (0, 0)
    else:
        a, b = (normal_dim(int(d), rank) for d in call.op.args[1:3])  # type: ignore[arg-type]
    if rank:
        order[a], order[b] = order[b], order[a]
    return order


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to")
def expand(call: Call) -> Iterator[OpSharding]:
    """A stretched dim may be sharded: each rank stretches less."""
    shape, out_shape = call.inputs[0], call.outputs[0]
    rest = [broadcast(s, out_shape) for s in call.inputs[1:]]
    yield from by_letters([broadcast(shape, out_shape), *rest], [range(len(out_shape))])
    if not rest:
        yield _PARTIAL


@local_form("aten.expand", "aten.expand_as", "aten.broadcast_to")
def expand_on_shard(placed: Placed) -> LocalForm:
    """The same expand to the sizes of the shard."""
    return placed.with_args(placed.op.args[0], placed.local_output(), target="aten.expand.default")


@rule("aten.slice", "aten.select", "aten.narrow", "aten.unfold")
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


@rule(
    "aten.split",
    "aten.split_with_sizes",
    "aten.chunk",
    "aten.tensor_split",
    "aten.unbind",
    "aten.unsafe_split",
    "aten.unsafe_chunk",
)
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


@local_form("aten.split", "aten.unsafe_split", "aten.split_with_sizes")
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


@rule("aten.cat", "aten.concat", "aten.stack")
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
        yield OpSharding(inputs=(Shard(dim),) * count, outputs=(Shard(dim, count),))


@rule("aten.pad", "aten.constant_pad_nd")
def pad(call: Call) -> Iterator[OpSharding]:
    """Dims that get no padding can be sharded."""
    sizes = call.op.args[1]
    assert isinstance(sizes, tuple)
    rank = len(call.inputs[0])
    padded = {rank - 1 - i // 2 for i, size in enumerate(sizes) if size != 0}
    yield from same_dims(call, fixed=padded)
    constant = (
        call.packet == "aten.constant_pad_nd" or call.arg(2, "mode", "constant") == "constant"
    )
    value = call.arg(2 if call.packet == "aten.constant_pad_nd" else 3, "value", 0)
    if not constant or not value:
        yield _PARTIAL


@rule("aten.repeat", "aten.tile")
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


@rule("aten.repeat_interleave")
def repeat_interleave(call: Call) -> Iterator[OpSharding]:
    """Copies of an entry stay neighbours, so even the repeated dim can be sharded."""
    if not isinstance(call.arg(1, "repeats"), int) or call.arg(2, "dim") is None:
        return
    yield from by_letters([range(len(call.inputs[0]))], [range(len(call.outputs[0]))])
    yield _PARTIAL


@local_form("aten.repeat_interleave")
def repeat_interleave_on_shard(placed: Placed) -> LocalForm:
    """Without the output size of the whole, which is optional."""
    op = placed.op
    return LocalForm((replace(op, kwargs=tuple(k for k in op.kwargs if k[0] != "output_size")),))


@rule("aten.broadcast_tensors")
def broadcast_together(call: Call) -> Iterator[OpSharding]:
    """Stretches several tensors to one shape; a dim that one of them lacks is stretched less."""
    whole = call.outputs[0]
    letters = [broadcast(shape, whole) for shape in call.inputs]
    out = [d if any(d in tensor for tensor in letters) else None for d in range(len(whole))]
    yield from by_letters(letters, [out] * len(call.outputs))
