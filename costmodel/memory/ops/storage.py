"""Which tensors of a program share memory: storages, views and strides, without torch.

Memory is held by storages, not tensors: a saved view keeps its whole base alive, and two
saved views of one base cost once. Whether `reshape` or `contiguous` copies depends on
strides, so they are followed too, with PyTorch's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from costmodel.time.plain_attention import is_plain
from planner.graph import Op, Program, TensorMeta
from planner.layout.placement import Placement, Replicate, Shard, parse_placement
from planner.units import DTYPE_BYTES

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory: the tensor that made it, its bytes, and that tensor's kind."""

    root: str
    num_bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class StorageMap:
    """Storages and strides of every tensor of a bound program.

    `storage[name]` is the storage a tensor lives in; `strides[name]` its strides in
    elements; `is_view` holds names whose op allocated nothing.
    """

    storage: Mapping[str, Storage]
    strides: Mapping[str, Strides]
    views: frozenset[str]


def base_name(target: str) -> str:
    """Return the operator's name without namespace and overload: ``aten.add.Tensor`` -> ``add``."""
    return target.split(".")[1]


def map_storages(program: Program, *, device_type: str = "cuda") -> StorageMap:
    """Follow views through a bound program (every size a number). `device_type` picks between
    kernels that lay their results out differently.
    """
    storage: dict[str, Storage] = {}
    strides: dict[str, Strides] = {}
    views: set[str] = set()
    for name in (*program.inputs, *program.params):
        meta = program.tensor[name]
        storage[name] = Storage(root=name, num_bytes=_num_bytes(meta), kind=meta.kind)
        strides[name] = contiguous_strides(meta.shape_at(1))
    for op in program.ops:
        for position, output in enumerate(op.outputs):
            meta = program.tensor[output]
            shape = meta.shape_at(1)
            source = _viewed_input(op, position)
            viewed = None
            if source is not None:
                viewed = _view_strides(op, source, output, program, strides)
            if viewed is not None and source is not None:
                storage[output], strides[output] = storage[source], viewed
                views.add(output)
            else:
                storage[output] = Storage(root=output, num_bytes=_num_bytes(meta), kind=meta.kind)
                strides[output] = _fresh_strides(op, shape, program, strides, device_type)
    return StorageMap(storage=storage, strides=strides, views=frozenset(views))


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return row-major strides of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a tensor is row-major; dims of size one may have any stride."""
    return prod(shape) == 0 or all(
        size == 1 or stride == expected
        for size, stride, expected in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def reshaped_strides(
    shape: Sequence[int], strides: Strides, new_shape: Sequence[int]
) -> Strides | None:
    """Return the strides of a view of another shape, or None when only a copy can do it.

    The rule of ATen's `computeStride`: old dims that lie one after the other in memory form
    a chunk, and every chunk must be divided exactly among new dims.
    """
    if prod(shape) != prod(new_shape):
        return None
    if prod(shape) == 0 or not shape:
        return contiguous_strides(new_shape)
    new_strides = [0] * len(new_shape)
    view_dim = len(new_shape) - 1
    chunk_base, tensor_numel, view_numel = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        ends_chunk = dim == 0 or (
            shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_base
        )
        if not ends_chunk:
            continue
        while view_dim >= 0 and (view_numel < tensor_numel or new_shape[view_dim] == 1):
            new_strides[view_dim] = view_numel * chunk_base
            view_numel *= new_shape[view_dim]
            view_dim -= 1
        if view_numel != tensor_numel:
            return None
        if dim > 0:
            chunk_base, tensor_numel, view_numel = strides[dim - 1], 1, 1
    return tuple(new_strides) if view_dim == -1 else None


RESHAPES = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel",
    "squeeze", "unsqueeze",
}  # fmt: skip
_PERMUTES = {"transpose", "swapaxes", "swapdims", "t", "permute", "movedim", "moveaxis", "mT"}
_KEEPS = {
    "alias", "detach", "lift_fresh", "lift_fresh_copy", "view_as_real", "real",
    "count_gradient_once",
}  # fmt: skip
_POINTWISE = {
    "add", "sub", "rsub", "mul", "div", "neg", "pow", "gelu", "silu", "relu", "tanh", "sigmoid",
    "exp", "sqrt", "rsqrt", "where", "masked_fill", "dropout", "clone", "to", "_to_copy", "sin",
    "cos", "abs", "clamp", "type_as", "float",
}  # fmt: skip


def _num_bytes(meta: TensorMeta) -> int:
    return prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype]


def _viewed_input(op: Op, output_position: int) -> str | None:
    """The input an output would be a view of: the first, but for pairwise broadcasting."""
    if not op.inputs:
        return None
    return op.inputs[output_position if base_name(op.target) == "broadcast_tensors" else 0]


def _view_strides(
    op: Op, source: str, output: str, program: Program, strides: Mapping[str, Strides]
) -> Strides | None:
    """Return the strides of an output that is a view of `source`, else None."""
    name = base_name(op.target)
    before, after = program.tensor[source], program.tensor[output]
    shape, new_shape, old = before.shape_at(1), after.shape_at(1), strides[source]
    args = op.args
    if name in RESHAPES:
        return reshaped_strides(shape, old, new_shape)
    if name in _KEEPS or (name.endswith("_") and not name.endswith("__")):
        return old
    if name in _PERMUTES:
        return permuted(name, args, shape, old)
    if name in {"expand", "expand_as", "broadcast_to", "broadcast_tensors"}:
        lead = (0,) * (len(new_shape) - len(shape))
        kept = zip(shape, new_shape[len(lead) :], old, strict=True)
        return lead + tuple(0 if was != now else stride for was, now, stride in kept)
    if name == "slice":
        dim = _int(args, 1, 0)
        return _with(old, dim, old[dim] * _int(args, 4, 1))
    if name in {"narrow", "split", "split_with_sizes", "chunk", "tensor_split"}:
        return old
    if name in {"select", "unbind"}:
        dim = _int(args, 1, 0) % len(shape)
        return old[:dim] + old[dim + 1 :]
    if name == "contiguous":
        return old if is_contiguous(shape, old) else None
    if name in {"to", "type_as", "float"}:
        return old if before.dtype == after.dtype else None
    if name in {"dropout", "feature_dropout", "alpha_dropout"}:
        return None if dropout_probability(op) else old
    if op.target == "planner.redistribute":
        return _redistributed(op, shape, old)
    return None


def dropout_probability(op: Op) -> float:
    """Return the probability of a dropout op, 0.0 when it is not in training mode."""
    kwargs = dict(op.kwargs)
    probability = op.args[1] if len(op.args) > 1 else kwargs.get("p", 0.5)
    training = op.args[2] if len(op.args) > 2 else kwargs.get("train", True)
    return float(probability) if training else 0.0  # type: ignore[arg-type]


def _redistributed(op: Op, shape: Sequence[int], old: Strides) -> Strides | None:
    """Return the strides of a redistribute's result where its forward hands its input on, or a
    contiguous slice of it.
    """
    src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
    if src == dst or (is_view_slice(src, dst, shape) and is_contiguous(shape, old)):
        return old
    return None


def is_view_slice(src: Placement, dst: Placement, shape: Sequence[int]) -> bool:
    """Whether a rank's own piece of a contiguous whole of this shape is contiguous too: then it is
    taken without a copy, and keeps the whole's memory.
    """
    return (
        isinstance(src, Replicate)
        and isinstance(dst, Shard)
        and dst.segments == 1
        and prod(shape[: dst.dim]) == 1
    )


def permuted(name: str, args: tuple, shape: Sequence[int], old: Strides) -> Strides | None:
    """Return the strides of a tensor whose dims were exchanged, None for another op."""
    rank = len(shape)
    order = list(range(rank))
    if name in {"t", "mT"}:
        if rank >= 2:
            order[-1], order[-2] = order[-2], order[-1]
    elif name in {"transpose", "swapaxes", "swapdims"}:
        first, second = args[1] % rank, args[2] % rank
        order[first], order[second] = order[second], order[first]
    elif name == "permute":
        order = [dim % rank for dim in args[1]]
    else:
        return None
    return tuple(old[dim] for dim in order)


def _fresh_strides(
    op: Op,
    shape: Sequence[int],
    program: Program,
    strides: Mapping[str, Strides],
    device_type: str,
) -> Strides:
    """Strides of newly allocated outputs: pointwise ops keep the order of a dense input."""
    name = base_name(op.target)
    if name == "scaled_dot_product_attention" and is_plain(op, program, device_type):
        return contiguous_strides(shape)
    if name in ("scaled_dot_product_attention", "causal_attention"):
        # Fused kernels allocate the output like the query: its order of dims, without gaps.
        return densified_strides(shape, strides[op.inputs[0]])
    if name in _POINTWISE:
        for source in op.inputs:
            same_shape = program.tensor[source].shape_at(1) == tuple(shape)
            if same_shape and is_dense(shape, strides[source]):
                return strides[source]
    return contiguous_strides(shape)


def densified_strides(shape: Sequence[int], strides: Strides) -> Strides:
    """Return strides without gaps that keep the order of dims in memory."""
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    dense, step = [0] * len(shape), 1
    for dim in order:
        dense[dim] = step
        step *= max(shape[dim], 1)
    return tuple(dense)


def is_dense(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in some order of dims."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _with(strides: Strides, dim: int, stride: int) -> Strides:
    dim %= len(strides)
    return (*strides[:dim], stride, *strides[dim + 1 :])


def _int(args: tuple, position: int, default: int) -> int:
    value = args[position] if len(args) > position else default
    return int(value)
