"""What the functions of a record are given of an op: its shapes, and its sharding on one mesh axis.

`Call` is one op with the whole shapes around it, `Placed` the same under a chosen sharding, and
`LocalForm` what then runs on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.language.graph import Arg, Op, Ref, TensorMeta
from planner.language.layout.placement import (
    OpSharding,
    Partial,
    Placement,
    Replicate,
    Shard,
    cut_dim,
)

Shape = tuple[int, ...]

R, P = Replicate(), Partial()


@dataclass(frozen=True, slots=True)
class Call:
    """One op, the tensors around it with whole (not local) shapes, and the axis size.

    `segments` are counts of segments worth offering (see `Shard`), beside one.
    """

    op: Op
    tensor: Mapping[str, TensorMeta]
    axis_size: int
    segments: tuple[int, ...] = ()

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by keyword, else `default`."""
        if index < len(self.op.args):
            return self.op.args[index]
        return next((value for key, value in self.op.kwargs if key == name), default)

    def shape(self, ref: Ref | str) -> Shape:
        """Return a tensor's whole shape."""
        return self.tensor[ref.name if isinstance(ref, Ref) else ref].shape_at(1)

    def num_bytes(self, ref: Ref | str) -> int:
        """Return a tensor's bytes."""
        return self.tensor[ref.name if isinstance(ref, Ref) else ref].bytes_at(1)

    def is_floating(self, ref: Ref | str) -> bool:
        """Whether a tensor can carry a gradient."""
        dtype = self.tensor[ref.name if isinstance(ref, Ref) else ref].dtype
        return dtype.startswith(("float", "bfloat", "complex"))

    @property
    def packet(self) -> str:
        """The op's name without its overload, such as ``aten.add``."""
        return self.op.target.rpartition(".")[0]

    @property
    def inputs(self) -> tuple[Shape, ...]:
        """Whole shapes of the tensors in the arguments, in order of appearance."""
        return tuple(self.shape(name) for name in self.op.inputs)

    @property
    def outputs(self) -> tuple[Shape, ...]:
        """Whole shapes of the outputs."""
        return tuple(self.shape(name) for name in self.op.outputs)

    def replicated(self) -> OpSharding:
        """Return the sharding every op has: all of it on every rank."""
        return OpSharding(inputs=(R,) * len(self.op.inputs), outputs=(R,) * len(self.op.outputs))


Rule = Callable[[Call], Iterable[OpSharding]]
"""The shardings by which an op computes the right thing on shards."""


@dataclass(frozen=True, slots=True)
class LocalForm:
    """What runs on one shard: ops in order, and metas of the tensors that only they have."""

    ops: tuple[Op, ...]
    tensors: tuple[TensorMeta, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A call with the sharding chosen for it, on a named mesh axis."""

    call: Call
    sharding: OpSharding
    axis: str

    @property
    def op(self) -> Op:
        """The op as captured."""
        return self.call.op

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of one rank's part of an output."""
        whole, placement = self.call.outputs[index], self.sharding.outputs[index]
        return local_shape(whole, placement, self.call.axis_size)

    def with_args(self, *args: Arg, target: str = "", kwargs: tuple = ()) -> LocalForm:
        """Return the op with other arguments (and another target)."""
        op = replace(self.op, args=args, kwargs=kwargs, target=target or self.op.target)
        return LocalForm((op,))

    def with_argument(self, index: int, name: str, value: Arg) -> LocalForm:
        """Return the op with one argument changed, whether it was given by place or by name."""
        op = self.op
        if index < len(op.args):
            return LocalForm((replace(op, args=(*op.args[:index], value, *op.args[index + 1 :])),))
        kwargs = tuple((key, value if key == name else old) for key, old in op.kwargs)
        return LocalForm((replace(op, kwargs=kwargs),))


def fits(placements: Sequence[Placement], shapes: Sequence[Shape], axis_size: int) -> bool:
    """Whether every shard of tensors of these shapes has an equal, whole size."""
    for placement, shape in zip(placements, shapes, strict=True):
        if not divides(placement, shape, axis_size):
            return False
    return True


def divides(placement: Placement, shape: Shape, axis_size: int) -> bool:
    """Whether a tensor of this shape splits evenly under a placement."""
    dim = cut_dim(placement)
    if dim is None:
        return True
    if dim >= len(shape):
        return False
    size = shape[dim]
    segments = placement.segments if isinstance(placement, Shard) else 1
    return size > 0 and size % (axis_size * segments) == 0


def local_shape(shape: Shape, placement: Placement, axis_size: int) -> Shape:
    """Return the shape of one rank's part of a tensor."""
    dim = cut_dim(placement)
    return tuple(s // axis_size if d == dim else s for d, s in enumerate(shape))


def normal_dim(dim: int, rank: int) -> int:
    """Return a tensor dim counted from the front."""
    return dim + rank if dim < 0 else dim


def normal_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Return a reduction's dims counted from the front; None or () means all of them."""
    if dims is None or dims == ():
        return tuple(range(rank))
    return tuple(normal_dim(d, rank) for d in ((dims,) if isinstance(dims, int) else dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Flop done and bytes moved by one execution."""

    flop: float
    read_bytes: float
    write_bytes: float

    @property
    def num_bytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


NO_WORK = Work(flop=0.0, read_bytes=0.0, write_bytes=0.0)


ProductArgs = tuple[Ref, Ref, Ref | None, bool]
"""What a product multiplies: x, weight and bias, and whether the weight is transposed."""
