"""Ops followed over what is known of their values: from positions and tables to masks.

Libraries make more of positions than masks need: where sequences may be packed, the runs in which
positions go up by one are numbered and compared. Of positions that do so throughout all of that is
constant; of a table of positions it says which places are of one run. What cannot be followed is
not known, and nothing that is made of it is either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.capture.masks.compare import TURNED, compared, compared_to_number
from planner.capture.masks.values import (
    Additive,
    Along,
    Breaks,
    Constant,
    Denied,
    Difference,
    Dims,
    First,
    Known,
    Pattern,
    Steps,
    both,
    moved,
    opposite,
)
from planner.language.graph import Affine, Op, Ref, TensorMeta
from planner.language.ops.record import packet_of

LEAST_MASKED = -1e4
"""A number so low, added to scores, leaves no weight: half precision has no lower round one."""

_WHOLE = ("int64", "int32", "float64", "float32")
"""Dtypes that have all positions of a sequence; half precision rounds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What an op is followed with."""

    op: Op
    """The op."""
    tensors: Mapping[str, TensorMeta]
    """All tensors of the graph."""
    known: Mapping[str, Known]
    """What is known of those made before."""
    runs: dict[str, str]
    """Tables that number the runs in which another table goes up by one; rules add to it."""

    @property
    def made(self) -> TensorMeta:
        """The op's result."""
        return self.tensors[self.op.outputs[0]]

    def of(self, arg: Any) -> Known | None:
        """Return what is known of an argument: a number is a constant."""
        if isinstance(arg, bool | int | float):
            return Constant(value=arg)
        if not isinstance(arg, Ref):
            return None
        return self.known.get(arg.name) or _given(self.tensors[arg.name])

    def arg(self, index: int, name: str, usual: Any = None) -> Any:
        """Return an argument by its place or its name."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, usual)


def follow(
    ops: Sequence[Op], tensors: Mapping[str, TensorMeta]
) -> tuple[dict[str, Known], dict[str, str]]:
    """Return what is known of values that ops make, and which tables number runs of which."""
    known: dict[str, Known] = {}
    runs: dict[str, str] = {}
    for op in ops:
        rule = _RULES.get(packet_of(op.target))
        if rule is None or len(op.outputs) != 1:
            continue
        found = rule(Following(op=op, tensors=tensors, known=known, runs=runs))
        if found is not None:
            known[op.outputs[0]] = found
    return known, runs


def _given(meta: TensorMeta) -> Known | None:
    """What any tensor is: a constant that is one number, or a table of samples and places."""
    if meta.data is not None:
        return Constant(value=meta.data[0]) if len(set(meta.data)) == 1 else None
    return _table(meta)


def _table(meta: TensorMeta) -> Along | None:
    """A tensor of numbers by sample and place, with any dims of size 1 between them or after."""
    if meta.requires_grad or meta.dtype in ("float16", "bfloat16"):
        return None
    dims = [at - len(meta.shape) for at, size in enumerate(meta.shape) if size != 1]
    if len(dims) != 2 or meta.shape[dims[0]] != Affine(1):
        return None
    size = meta.shape[dims[1]]
    if not isinstance(size, int):
        return None
    return Along(dim=dims[1], size=size, table=meta.name, sample=dims[0])


# ---------------------------------------------------------------------------------------- makers


def _arange(at: Following) -> Known | None:
    if len(at.op.args) != 1:
        return None
    (size,) = at.made.shape
    if at.made.dtype not in _WHOLE:
        return None
    if not isinstance(size, int):
        return Along(dim=-1, size=None) if size == Affine(1) else None
    return Along(dim=-1, size=size)


def _filled(number: int | None) -> Callable[[Following], Known | None]:
    def fill(at: Following) -> Known | None:
        value = number if number is not None else at.op.args[-1]
        return Constant(value=value) if isinstance(value, bool | int | float) else None

    return fill


# --------------------------------------------------------------------------------- moves of values


def _same_value(at: Following) -> Known | None:
    return at.of(at.op.args[0])


def _cast(at: Following) -> Known | None:
    value, dtype = at.of(at.op.args[0]), at.made.dtype
    was = at.tensors[at.op.inputs[0]].dtype
    if isinstance(value, Constant):
        if dtype == "bool":
            return Constant(value=int(bool(value.value)))
        return value if "float" in dtype or isinstance(value.value, int) else None
    if dtype == "bool":
        if isinstance(value, Pattern | Denied):
            return value
        return value if was == "bool" else None
    if isinstance(value, Along) and was != "bool":
        return value if dtype in _WHOLE else None
    if isinstance(value, Additive | Pattern | Denied):
        return value
    return None


def _expand(at: Following) -> Known | None:
    value = at.of(at.op.args[0])
    if isinstance(value, Along):
        size = Affine(1) if value.size is None else value.size
        return value if at.made.shape[value.dim] == size else None
    # Of the others each dim that counts has more than one place, and is not expanded.
    return value if isinstance(value, Constant | Pattern | Denied | Additive) else None


def _unsqueeze(at: Following) -> Known | None:
    value, dim = at.of(at.op.args[0]), at.op.args[1]
    rank = len(at.made.shape)
    assert isinstance(dim, int)
    return None if value is None else moved(value, dim - rank if dim >= 0 else dim)


def _slice(at: Following) -> Known | None:
    value, dim = at.of(at.op.args[0]), at.arg(1, "dim", 0)
    source = at.tensors[at.op.inputs[0]]
    # (All of the dim: the value itself.)
    if isinstance(value, Constant) or at.made.shape == source.shape:
        return value
    from_end = dim - len(source.shape) if dim >= 0 else dim
    start, step = at.arg(2, "start"), at.arg(4, "step", 1)
    if not isinstance(value, Along) or from_end != value.dim:
        return None
    size = at.made.shape[from_end]
    if step != 1 or start not in (None, 0) or not isinstance(size, int):
        return None
    if size == 1:
        return First(of=value)
    return replace(value, size=size) if value.table is None else None


def _index(at: Following) -> Known | None:
    """A table read at samples and places, or positions at positions."""
    value, indices = at.of(at.op.args[0]), at.op.args[1]
    if isinstance(value, Constant):
        return value
    source = at.tensors[at.op.inputs[0]]
    if not isinstance(value, Along) or not isinstance(indices, tuple):
        return None
    if len(indices) != len(source.shape):
        return None
    found = [at.of(index) for index in indices]
    places = found[value.dim]
    if not isinstance(places, Along) or places.table is not None or places.add:
        return None
    if places.size is None or places.divided_by != 1 or places.size != value.size:
        return None
    if value.sample is None:  # other dims repeat the same numbers
        is_plain = all(isinstance(each, Along) and each.table is None for each in found)
        return replace(value, dim=places.dim) if is_plain else None
    samples = found[value.sample]
    if len(found) != 2 or not isinstance(samples, Along) or samples.size is not None:
        return None
    is_every = samples.table is None and not samples.add and samples.divided_by == 1
    return replace(value, dim=places.dim, sample=samples.dim) if is_every else None


# -------------------------------------------------------------------------------------- arithmetic


def _added(sign: int) -> Callable[[Following], Known | None]:
    def add(at: Following) -> Known | None:
        first, second = at.of(at.op.args[0]), at.of(at.op.args[1])
        if at.arg(2, "alpha", 1) != 1:
            return None
        # Two masks added: a pair counts where both let it through.
        if isinstance(first, Additive) and isinstance(second, Additive) and sign > 0:
            pattern = both(first.pattern, second.pattern)
            return None if pattern is None else Additive(pattern=pattern)
        if isinstance(first, Constant) and isinstance(second, Constant):
            return Constant(value=first.value + sign * second.value)
        if isinstance(second, Constant) and isinstance(second.value, int):
            by = sign * second.value
            if isinstance(first, First | Difference) and not getattr(first, "is_amount", False):
                return replace(first, add=first.add + by)
            if isinstance(first, Along) and first.divided_by == 1:
                return replace(first, add=first.add + by)
            return None
        if sign < 0 and isinstance(first, Along) and isinstance(second, Along):
            return _difference(first, second)
        return None

    return add


def _difference(first: Along, second: Along) -> Known | None:
    plain = first.divided_by == second.divided_by == 1 and first.dim != second.dim
    if not plain or (first.table, first.sample) != (second.table, second.sample):
        return None
    is_negative = first.dim > second.dim  # keys are behind queries in the order of dims
    query, key = (second, first) if is_negative else (first, second)
    return Difference(query=query, key=key, is_negative=is_negative)


def _amount(at: Following) -> Known | None:
    value = at.of(at.op.args[0])
    if isinstance(value, Difference) and not value.add:
        return replace(value, is_amount=True)
    return None


def _divided(at: Following) -> Known | None:
    value, by = at.of(at.op.args[0]), at.of(at.op.args[1])
    if not isinstance(value, Along) or not isinstance(by, Constant) or value.divided_by != 1:
        return None
    if not isinstance(by.value, int) or by.value < 1 or "float" in at.made.dtype:
        return None
    return replace(value, divided_by=by.value)


def _scaled(at: Following) -> Known | None:
    """A low number times where a pattern does not hold; masks together, as 0 and 1."""
    first, second = at.of(at.op.args[0]), at.of(at.op.args[1])
    for each, other in ((first, second), (second, first)):
        if isinstance(each, Constant) and isinstance(other, Denied):
            # (Minus infinity times 0 is NaN, so it makes no mask in this way.)
            is_low = LEAST_MASKED >= each.value > -float("inf")
            return Additive(pattern=other.pattern) if is_low else None
    if isinstance(first, Pattern) and isinstance(second, Pattern):
        return both(first, second)
    return None


def _steps(at: Following) -> Known | None:
    """Differences of neighbours, the first from what is put ahead."""
    value = at.of(at.op.args[0])
    order, dim, ahead = at.arg(1, "n", 1), at.arg(2, "dim", -1), at.of(at.arg(3, "prepend"))
    rank = len(at.made.shape)
    if not isinstance(value, Along) or order != 1 or at.arg(4, "append") is not None:
        return None
    if (dim - rank if dim >= 0 else dim) != value.dim or value.divided_by != 1:
        return None
    if at.arg(3, "prepend") is None:
        return Constant(value=1) if value.table is None else None
    if value.table is None:
        is_before = ahead in (Constant(value=value.add - 1), First(of=value, add=-1))
        return Constant(value=1) if is_before else None
    return Steps(of=value) if ahead == First(of=value, add=-1) else None


def _cumsum(at: Following) -> Known | None:
    value, dim = at.of(at.op.args[0]), at.op.args[1]
    if value == Constant(value=0):
        return value
    made = _table(at.made)
    if made is None or not isinstance(value, Breaks) or value.of.table is None:
        return None
    if dim in (made.dim, made.dim + len(at.made.shape)):
        # How many breaks there were up to a place is the number of its run.
        at.runs[at.made.name] = value.of.table
    return made


# ------------------------------------------------------------------------------------------- truth


def _truth(at: Following, arg: Any) -> Known | None:
    """Return what is known of an argument as truth: of a table of truth the keys that may be looked
    at. None where its numbers may be others than 0 and 1: `arange(n) & 1` is no position.
    """
    value = at.of(arg)
    if isinstance(value, Pattern | Denied):
        return value
    if isinstance(value, Constant):
        return value if value.value in (0, 1) else None
    is_truth = isinstance(arg, Ref) and at.tensors[arg.name].dtype == "bool"
    if not isinstance(value, Along) or not is_truth or value.table is None:
        return None
    plain = value.add == 0 and value.divided_by == 1
    dims = Dims(key=value.dim, sample=value.sample)
    return Pattern(keys=frozenset((value.table,)), dims=dims) if plain else None


def _and(at: Following) -> Known | None:
    first, second = (_truth(at, arg) for arg in at.op.args[:2])
    for each, other in ((first, second), (second, first)):
        if isinstance(each, Constant):
            return other if each.value else each
    if isinstance(first, Pattern) and isinstance(second, Pattern):
        return both(first, second)
    return None


def _or(at: Following) -> Known | None:
    first, second = (_truth(at, arg) for arg in at.op.args[:2])
    for each, other in ((first, second), (second, first)):
        if isinstance(each, Constant) and not each.value:
            return other
        # Of whole numbers bits are joined: 1 and what is not known may be 3.
        if isinstance(each, Constant) and (at.made.dtype == "bool" or other is not None):
            return each
    if isinstance(first, Denied) and isinstance(second, Denied):
        pattern = both(first.pattern, second.pattern)
        return None if pattern is None else Denied(pattern=pattern)
    return None


def _not(at: Following) -> Known | None:
    value = _truth(at, at.op.args[0])
    if at.made.dtype != "bool":  # bits of whole numbers: not 0 is -1
        return None
    if isinstance(value, Constant):
        return Constant(value=int(not value.value))
    if isinstance(value, Denied):
        return value.pattern
    elsewhere = opposite(value) if isinstance(value, Pattern) else None
    if elsewhere is not None:
        return elsewhere
    return Denied(pattern=value) if isinstance(value, Pattern) else None


def _comparison(at: Following) -> Known | None:
    first, second = at.of(at.op.args[0]), at.of(at.op.args[1])
    packet = packet_of(at.op.target)
    if isinstance(first, Steps) and second == Constant(value=1) and packet == "ne":
        return Breaks(of=first.of)
    if isinstance(second, Constant):
        return compared_to_number(packet, first, second.value)
    if isinstance(first, Constant):
        return compared_to_number(TURNED[packet], second, first.value)
    if isinstance(first, Along) and isinstance(second, Along):
        return compared(packet, first, second)
    return None


def _triangle(is_lower: bool) -> Callable[[Following], Known | None]:
    """Ones or low numbers on one side of a diagonal, and 0 on the other."""

    def cut(at: Following) -> Known | None:
        value, diagonal = at.of(at.op.args[0]), at.arg(1, "diagonal", 0)
        if not isinstance(value, Constant) or not isinstance(diagonal, int):
            return None
        dims = Dims(query=-2, key=-1)
        # Kept are keys up to `diagonal` ahead of the query, or from there on.
        if value.value == 1:
            ahead = (-diagonal, None) if is_lower else (None, -diagonal)
            return Pattern(ahead=ahead, dims=dims)
        # A triangle of low numbers denies what it keeps: the pattern is the other side of the
        # diagonal.
        ahead = (None, -diagonal - 1) if is_lower else (1 - diagonal, None)
        low = value.value <= LEAST_MASKED
        return Additive(pattern=Pattern(ahead=ahead, dims=dims)) if low else None

    return cut


def _where(at: Following) -> Known | None:
    condition = _truth(at, at.op.args[0])
    return _chosen(condition, at.of(at.arg(1, "self")), at.of(at.arg(2, "other")))


def _masked_fill(at: Following) -> Known | None:
    return _chosen(_truth(at, at.op.args[1]), at.of(at.op.args[2]), at.of(at.op.args[0]))


def _chosen(condition: Known | None, chosen: Known | None, other: Known | None) -> Known | None:
    if isinstance(condition, Constant):
        return chosen if condition.value else other
    if chosen == other:
        return chosen
    if isinstance(condition, Denied):
        return _chosen(condition.pattern, other, chosen)
    if not isinstance(condition, Pattern):
        return None
    if _is_low(chosen):
        elsewhere = None if _is_low(other) else opposite(condition)
        return None if elsewhere is None else _chosen(elsewhere, other, chosen)
    if _is_low(other):
        if chosen == Constant(value=0):
            return Additive(pattern=condition)
        if isinstance(chosen, Additive):
            pattern = both(chosen.pattern, condition)
            return None if pattern is None else Additive(pattern=pattern)
    if isinstance(other, Constant) and isinstance(chosen, Constant):
        if chosen.value == 1 and other.value == 0:
            return condition
        if chosen.value == 0 and other.value == 1:
            return Denied(pattern=condition)
    return None


def _is_low(value: Known | None) -> bool:
    return isinstance(value, Constant) and value.value <= LEAST_MASKED


_Rule = Callable[[Following], Known | None]

_RULES: dict[str, _Rule] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(0)),
    **dict.fromkeys(("full", "new_full", "full_like", "scalar_tensor"), _filled(None)),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias"), _same_value),
    "to": _cast,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    "index": _index,
    "add": _added(1),
    "sub": _added(-1),
    "abs": _amount,
    "floor_divide": _divided,
    "mul": _scaled,
    "diff": _steps,
    "cumsum": _cumsum,
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    **dict.fromkeys(("le", "lt", "ge", "gt", "eq", "ne"), _comparison),
    "tril": _triangle(True),
    "triu": _triangle(False),
    "where": _where,
    "masked_fill": _masked_fill,
}
