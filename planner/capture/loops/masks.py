"""Whose rows a mask picks: numbers of experts compared with one, and what is made of that.

A router chooses k experts of each of r rows by `topk`, or one by `argmax`. Masks are told by what
their dims run over:

    r    rows        k    the choices of a row        n    both, one after the other
    e    experts     1    nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.capture.routing.following import RESHAPED, root_of
from planner.language.graph import Op, Ref, TensorMeta
from planner.language.ops.call import normal_dim
from planner.language.ops.record import packet_of

_FLAGS = ("to", "_to_copy", "ne", "gt", "eq", "ge")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Numbers of the experts that a router chose, each below `experts`, none twice for a row."""

    root: str
    """The tensor that the router made."""
    experts: int
    choices: int
    """Of a row, k."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Where an expert was chosen, or each of them (`dims` has an "e", `expert` is None)."""

    chosen: Chosen
    dims: tuple[str, ...]
    expert: int | None = None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How often each expert was chosen, or whether it was."""

    chosen: Chosen


class Masks:
    """What is known of masks. Mutable: it grows op by op."""

    def __init__(self, tensors: Mapping[str, TensorMeta]) -> None:
        self._tensors, self._makers = tensors, dict[str, Op]()
        self.known: dict[str, Mask | Counts] = {}

    def look(self, op: Op) -> None:
        """Note what an op makes."""
        self._makers |= dict.fromkeys(op.outputs, op)
        rule = _RULES.get(packet_of(op.target))
        made = rule(self, op) if rule is not None and op.inputs else None
        if made is not None:
            self.known[op.outputs[0]] = made

    def chosen(self, name: str) -> tuple[Chosen, tuple[str, ...]] | None:
        """Return the choice that a tensor of whole numbers is, and its dims."""
        root = root_of(name, self._makers, self._tensors, casts=True)
        maker = self._makers.get(root)
        if maker is None or not maker.inputs or root != maker.outputs[-1]:
            return None
        packet, source = packet_of(maker.target), maker.inputs[0]
        rank = len(self._tensors[source].shape)
        number = self._tensors[source].shape[-1] if rank else None
        if type(number) is not int or len(maker.inputs) != 1:
            return None
        if packet == "topk":
            dim, choices = _arg(maker, 2, "dim", -1), maker.args[1]
        elif packet in ("argmax", "max") and len(maker.args) > 1 and not _arg(maker, 2, "keepdim"):
            dim, choices = maker.args[1], 1
        else:
            return None
        if type(choices) is not int or type(dim) is not int or normal_dim(dim, rank) != rank - 1:
            return None
        found = Chosen(root=root, experts=number, choices=choices)
        shape = self._tensors[name].shape
        if packet == "topk" and shape[-1:] == (choices,) and len(shape) > 1:
            return found, (*("r",) * (len(shape) - 1), "k")
        return found, ("r" if choices == 1 else "n",) if len(shape) == 1 else ("r",) * len(shape)

    def shape(self, name: str) -> tuple[Any, ...]:
        """Return a tensor's sizes."""
        return self._tensors[name].shape

    def mask(self, name: str) -> Mask | None:
        """Return what a mask is, if it is known."""
        found = self.known.get(name)
        return found if isinstance(found, Mask) else None


def _arg(op: Op, index: int, name: str, usual: Any = None) -> Any:
    return op.args[index] if index < len(op.args) else dict(op.kwargs).get(name, usual)


def _equal(masks: Masks, op: Op) -> Mask | Counts | None:
    """The choice is a number, or a mask is what it is compared with."""
    if len(op.inputs) != 1 or len(op.args) != 2:
        return None
    if masks.known.get(op.inputs[0]) is not None:
        return _flagged(masks, op)
    found, number = masks.chosen(op.inputs[0]), op.args[1]
    if found is None or type(number) is not int or not 0 <= number < found[0].experts:
        return None
    return Mask(chosen=found[0], dims=found[1], expert=number)


def _flagged(masks: Masks, op: Op) -> Mask | Counts | None:
    """The same in another dtype, or as the answer to whether it is more than none."""
    packet, known = packet_of(op.target), masks.known.get(op.inputs[0])
    if len(op.inputs) != 1 or (packet in ("to", "_to_copy") and isinstance(known, Counts)):
        return None
    same = packet in ("to", "_to_copy") or (
        len(op.args) == 2
        and type(op.args[1]) is int
        and (packet, op.args[1]) in (("ne", 0), ("gt", 0), ("eq", 1), ("ge", 1))
        and not (packet == "eq" and isinstance(known, Counts))
    )
    return known if same else None


def _one_hot(masks: Masks, op: Op) -> Mask | None:
    found = masks.chosen(op.inputs[0])
    number = masks.shape(op.outputs[0])[-1]
    # (Experts beyond those that a router has are never chosen.)
    if found is None or type(number) is not int or number < found[0].experts:
        return None
    return Mask(chosen=found[0], dims=(*found[1], "e"))


def _permuted(masks: Masks, op: Op) -> Mask | None:
    known = masks.mask(op.inputs[0])
    if known is None:
        return None
    rank = len(known.dims)
    order = [*range(rank)]
    if packet_of(op.target) == "permute":
        order = [normal_dim(dim, rank) for dim in op.args[1]]  # type: ignore[union-attr,arg-type]
    else:
        first, second = (normal_dim(dim, rank) for dim in op.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
    of_rows = [dim for dim in order if known.dims[dim] == "r"]
    if of_rows != sorted(of_rows):
        return None  # (rows in another order)
    return replace(known, dims=tuple(known.dims[dim] for dim in order))


def _selected(masks: Masks, op: Op) -> Mask | None:
    """The mask of an expert; with a dim of size 1 in its place where it is a slice."""
    known, dim, start = masks.mask(op.inputs[0]), op.args[1], op.args[2]
    if known is None or type(dim) is not int or type(start) is not int:
        return None
    dim = normal_dim(dim, len(known.dims))
    if known.dims[dim] == "1" and packet_of(op.target) == "select" and start in (0, -1):
        return replace(known, dims=(*known.dims[:dim], *known.dims[dim + 1 :]))
    if known.dims[dim] != "e" or not 0 <= start < known.chosen.experts:
        return None
    left: tuple[str, ...] = ()
    if packet_of(op.target) == "slice":
        if _arg(op, 3, "end") != start + 1 or _arg(op, 4, "step", 1) != 1:
            return None
        left = ("1",)
    dims = (*known.dims[:dim], *left, *known.dims[dim + 1 :])
    return replace(known, dims=dims, expert=start)


def _any(masks: Masks, op: Op) -> Mask | None:
    """Rows of which any choice is the expert."""
    known = masks.mask(op.inputs[0])
    dim = _arg(op, 1, "dim")
    if known is None or known.expert is None or type(dim) is not int or _arg(op, 2, "keepdim"):
        return None
    dim = normal_dim(dim, len(known.dims))
    if known.dims[dim] != "k":
        return None
    return replace(known, dims=(*known.dims[:dim], *known.dims[dim + 1 :]))


def _summed(masks: Masks, op: Op) -> Counts | None:
    """How often each expert was chosen."""
    known, dims = masks.mask(op.inputs[0]), _arg(op, 1, "dim", ())
    if known is None or known.expert is not None or _arg(op, 2, "keepdim"):
        return None
    given = {dims} if type(dims) is int else {*(dims or ())}
    summed = {normal_dim(dim, len(known.dims)) for dim in given}
    left = [name for at, name in enumerate(known.dims) if at not in summed]
    return Counts(chosen=known.chosen) if left == ["e"] else None


def _reshaped(masks: Masks, op: Op) -> Mask | Counts | None:
    """Rows, or rows and their choices, one after the other; dims of size 1 left out."""
    known = masks.known.get(op.inputs[0])
    before, made = masks.shape(op.inputs[0]), masks.shape(op.outputs[0])
    if not isinstance(known, Mask):
        return known if before == made else None
    if before == made:
        return known
    kept = [(d, size) for d, size in zip(known.dims, before, strict=True) if d != "1"]
    dims = tuple(d for d, _ in kept)
    if tuple(size for _, size in kept) == made:
        return replace(known, dims=dims)
    if "e" in dims or known.dims != dims:
        return None
    of_rows = tuple(d for d in dims if d == "r")
    if dims == (*of_rows, "k") and len(made) == 1:
        return replace(known, dims=("r",) if known.chosen.choices == 1 else ("n",))
    if dims == (*of_rows, "k") and len(made) == 2 and made[1] == before[-1]:
        return replace(known, dims=("r", "k"))
    return replace(known, dims=("r",)) if dims == of_rows and len(made) == 1 else None


_RULES: dict[str, Callable[[Masks, Op], Mask | Counts | None]] = {
    **dict.fromkeys(_FLAGS, _flagged),
    **dict.fromkeys(RESHAPED, _reshaped),
    **dict.fromkeys(("permute", "transpose"), _permuted),
    **dict.fromkeys(("select", "slice"), _selected),
    "eq": _equal,
    "one_hot": _one_hot,
    "any": _any,
    "sum": _summed,
}


def refs_in(value: Any) -> Sequence[Ref]:
    """Return the tensors of an argument."""
    if isinstance(value, Ref):
        return (value,)
    if isinstance(value, tuple):
        return tuple(ref for each in value for ref in refs_in(each))
    return ()
