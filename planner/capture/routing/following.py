"""An op of a captured model, what is known before it, and what shapes and values it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.capture.routing.values import Known, Rows, sort_of
from planner.language.graph import Affine, Op, Ref, Size, TensorMeta
from planner.language.ops.call import normal_dim
from planner.language.ops.record import packet_of

RESHAPED = (
    *("reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze"),
    *("contiguous", "clone", "detach", "alias"),
)
"""Ops whose result has the entries of their first input, in the same order."""


@dataclass(frozen=True, kw_only=True)
class Following:
    """What an op is followed with."""

    op: Op
    """The op."""
    tensors: Mapping[str, TensorMeta]
    """All tensors of the graph."""
    known: Mapping[str, Known]
    """What is known of those made before."""
    makers: Mapping[str, Op]
    """What made each tensor."""

    def of(self, arg: Any) -> Known | None:
        """Return what is known of an argument."""
        return self.known.get(arg.name) if isinstance(arg, Ref) else None

    def arg(self, index: int, name: str, usual: Any = None) -> Any:
        """Return an argument by its place or its name."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, usual)

    def shape(self, arg: Any) -> tuple[Size, ...]:
        """Return a tensor's sizes."""
        return self.tensors[arg.name if isinstance(arg, Ref) else arg].shape

    def dim(self, index: int, name: str = "dim", usual: int = -1) -> int | None:
        """Return an argument that is a dim of the first input, counted from the front."""
        dim = self.arg(index, name, usual)
        return normal_dim(dim, len(self.shape(self.op.inputs[0]))) if type(dim) is int else None

    @property
    def made(self) -> TensorMeta:
        """The op's first result."""
        return self.tensors[self.op.outputs[0]]

    @cached_property
    def sorts(self) -> set[str]:
        """Sorts that what the op takes follows from."""
        return {sort for name in self.op.inputs if (sort := sort_of(self.known.get(name)))}

    @property
    def rows(self) -> list[str]:
        """The inputs that are rows in a new order."""
        return [name for name in self.op.inputs if isinstance(self.known.get(name), Rows)]


def root_of(
    name: str, makers: Mapping[str, Op], tensors: Mapping[str, TensorMeta], *, casts: bool = False
) -> str:
    """Return the tensor whose entries another one has, in the same order; with `casts` also one of
    another dtype of whole numbers.
    """
    while (maker := makers.get(name)) is not None and len(maker.outputs) == 1:
        packet = packet_of(maker.target)
        is_cast = casts and packet in ("to", "_to_copy") and keeps_numbers(maker, tensors)
        # (A detached tensor has the same entries, and no gradient.)
        ends = packet == "detach" and "int" not in tensors[maker.inputs[0]].dtype
        if ends or (packet not in RESHAPED and not is_cast):
            break
        name = maker.inputs[0]
    return name


def keeps_numbers(cast: Op, tensors: Mapping[str, TensorMeta]) -> bool:
    """Whether a cast leaves numbers of experts as they are: half precision would round them."""
    exact = ("int64", "int32", "int16", "float32", "float64")
    return all(tensors[name].dtype in exact for name in (cast.inputs[0], cast.outputs[0]))


def times(size: Size, number: int) -> Size:
    """Return a size, so many times."""
    if isinstance(size, Affine):
        return Affine(size.per_sample * number, size.fixed * number)
    return size * number


def is_growing(meta: TensorMeta) -> bool:
    """Whether a tensor has more entries for more samples."""
    return any(isinstance(size, Affine) for size in meta.shape)
