"""Which masks of a captured model are causal and nothing else: attention need not read them.

A preamble makes masks of positions. Its ops are followed over what is known of each value:

    positions    0, 1, .. along one dim, the same along the others
    constant     one number everywhere
    causal       true where the key (last dim) is no later than the query (the dim before it)

Libraries make more of positions than that: where sequences may be packed, the runs in which
positions go up by one are numbered and compared. Of positions that do so throughout, all of that is
constant. What cannot be followed is not known, and no mask is taken for causal that is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planner.graph import Arg, ModelGraph, Op, Ref
from planner.ops.record import packet_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Numbers 0, 1, .. along one dim of a tensor of so many dims."""

    dim: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number, or truth as 0 or 1, at every place."""

    value: int


Known = Positions | Constant | Literal["causal"]

SAME_VALUES = ("to", "contiguous", "clone")


def causal_masks(graph: ModelGraph) -> frozenset[str]:
    """Return the values of a graph's preamble that are causal masks of every pair of positions,
    made of positions alone: True where a key is no later than a query.
    """
    known: dict[str, Known] = {}
    for op in graph.preamble.ops:
        if len(op.outputs) == 1 and (found := _followed(op, known)) is not None:
            known[op.outputs[0]] = found
    return frozenset(name for name in graph.preamble.outputs if known.get(name) == "causal")


def causal_inputs(graph: ModelGraph, masks: frozenset[str]) -> Mapping[int, frozenset[str]]:
    """Return, by class, the inputs of its program that are a causal mask in all its blocks."""
    found: dict[int, frozenset[str]] = {}
    for block in graph.blocks:
        names = graph.classes[block.class_index].inputs
        mine = {own for own, name in zip(names, block.inputs, strict=True) if name in masks}
        index = block.class_index
        found[index] = found.get(index, frozenset(mine)) & mine
    return found


def _followed(op: Op, known: Mapping[str, Known]) -> Known | None:
    """Return what an op makes, or nothing where that is not known."""
    packet = packet_of(op.target)
    if packet == "arange":
        return Positions(dim=0, rank=1) if len(op.args) == 1 else None
    if packet == "new_ones":
        return Constant(value=1)
    taken = [known.get(name) for name in op.inputs]
    if not taken or taken[0] is None:
        return None
    if packet in _BOTH and len(taken) == 2:
        return _both(*taken)
    if packet in _COMPARISONS and len(taken) == 2:
        return _compared(packet, *taken)
    if packet in SAME_VALUES:
        return taken[0]
    if taken[0] == "causal":
        return "causal" if packet == "expand" else None
    if isinstance(taken[0], Constant):
        return _of_constant(packet, taken[0], op.args)
    assert isinstance(taken[0], Positions)
    return _of_positions(packet, taken[0], op.args, known)


_BOTH = ("__and__", "bitwise_and", "logical_and")
_COMPARISONS = ("le", "ge", "eq")
_MOVED = ("expand", "unsqueeze", "slice", "index")
"""Ops that leave a constant what it is."""


def _both(first: Known | None, second: Known | None) -> Known | None:
    """Two truths together: what is true everywhere changes nothing."""
    for each, other in ((first, second), (second, first)):
        if each == Constant(value=1):
            return other
    return None


def _compared(packet: str, first: Known | None, second: Known | None) -> Known | None:
    if isinstance(first, Constant) and isinstance(second, Constant):
        truth = {
            "le": first.value <= second.value,
            "ge": first.value >= second.value,
            "eq": first.value == second.value,
        }
        return Constant(value=int(truth[packet]))
    keys, queries = (first, second) if packet == "le" else (second, first)
    if packet == "eq" or not (isinstance(keys, Positions) and isinstance(queries, Positions)):
        return None
    from_end = keys.dim - keys.rank, queries.dim - queries.rank
    return "causal" if from_end == (-1, -2) else None


def _of_constant(packet: str, constant: Constant, args: tuple[Arg, ...]) -> Constant | None:
    value = constant.value
    if packet in _MOVED or (packet == "cumsum" and value == 0):
        return constant
    number = args[1] if len(args) == 2 and isinstance(args[1], int) else None
    if number is None:
        return None
    made = {
        "add": value + number,
        "sub": value - number,
        "ne": value != number,
        "eq": value == number,
    }
    return Constant(value=int(made[packet])) if packet in made else None


def _of_positions(
    packet: str, positions: Positions, args: tuple[Arg, ...], known: Mapping[str, Known]
) -> Known | None:
    dim, rank = positions.dim, positions.rank
    if packet in ("add", "sub"):
        return positions if args[1] == 0 else None
    if packet == "unsqueeze":
        at = args[1]
        assert isinstance(at, int)
        at += (rank + 1) * (at < 0)
        return Positions(dim=dim + (at <= dim), rank=rank + 1)
    if packet == "expand":
        shape = args[1]
        assert isinstance(shape, tuple)
        return Positions(dim=dim + len(shape) - rank, rank=len(shape))
    if packet == "slice":
        return Constant(value=0) if args[1:] == (dim, 0, 1) else None
    if packet == "diff":
        return _steps(positions, args, known)
    if packet == "index":
        return _picked(positions, args, known)
    return None


def _steps(
    positions: Positions, args: tuple[Arg, ...], known: Mapping[str, Known]
) -> Constant | None:
    """Differences of neighbours, the first from what is put ahead: 1, where that is -1."""
    usual: list[Arg] = [1, -1, None]
    if len(args) > 1 + len(usual):
        return None
    order, along, ahead = [*args[1:], *usual[len(args) - 1 :]]
    if order != 1 or along not in (positions.dim, positions.dim - positions.rank):
        return None
    is_before = ahead is None or (
        isinstance(ahead, Ref) and known.get(ahead.name) == Constant(value=-1)
    )
    return Constant(value=1) if is_before else None


def _picked(
    positions: Positions, args: tuple[Arg, ...], known: Mapping[str, Known]
) -> Positions | None:
    """Positions at positions are these; indices of other dims change nothing."""
    indices = args[1]
    if not isinstance(indices, tuple) or len(indices) != positions.rank:
        return None
    found = [known.get(index.name) if isinstance(index, Ref) else None for index in indices]
    at = found[positions.dim]
    if not isinstance(at, Positions) or not all(isinstance(each, Positions) for each in found):
        return None
    rank = max(each.rank for each in found if isinstance(each, Positions))
    return Positions(dim=at.dim + rank - at.rank, rank=rank)
