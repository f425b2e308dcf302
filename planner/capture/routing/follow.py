"""Ops followed over what is known of routing: orders, counts, and rows in an order.

What is not recognised is not known, and nothing that is made of it is either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from planner.capture.routing.following import RESHAPED, Following, keeps_numbers, root_of
from planner.capture.routing.rows import ROW_RULES, by_rows
from planner.capture.routing.values import (
    Blank,
    Counts,
    Hits,
    InOrder,
    Inverse,
    Known,
    Numbers,
    Ones,
    Order,
)
from planner.language.graph import Op, Ref, TensorMeta
from planner.language.ops.record import packet_of

SORTS = ("sort", "argsort")


def follow(
    ops: Sequence[Op], tensors: Mapping[str, TensorMeta]
) -> tuple[dict[str, Known], dict[str, Op]]:
    """Return what is known of values that ops make, and what made each tensor."""
    known: dict[str, Known] = {}
    makers: dict[str, Op] = {}
    for op in ops:
        at = Following(op=op, tensors=tensors, known=known, makers=makers)
        packet = packet_of(op.target)
        if packet in SORTS:
            known |= _sorted(at)
        else:
            rules = (*_RULES.get(packet, ()), *ROW_RULES.get(packet, ()), by_rows)
            found = next((each for rule in rules if (each := rule(at)) is not None), None)
            if found is not None:
                known |= dict.fromkeys(op.outputs, found)
        makers |= dict.fromkeys(op.outputs, op)
    return known, makers


def experts_of(at: Following, name: str) -> tuple[str, str | None] | None:
    """Return the tensor whose experts' numbers a tensor has, in any order, and the sort that they
    are in the order of; None where it has no whole numbers.
    """
    root = root_of(name, at.makers, at.tensors, casts=True)
    known = at.known.get(root)
    if isinstance(known, InOrder):
        sort = at.makers[known.sort]
        return root_of(sort.inputs[0], at.makers, at.tensors, casts=True), known.sort
    if known is not None or "int" not in at.tensors[root].dtype:
        return None
    return root, None


# ------------------------------------------------------------------------------------ orders


def _sorted(at: Following) -> dict[str, Known]:
    """A sort of experts' numbers, or of an order, which is undone so."""
    op, source = at.op, at.op.inputs[0]
    if len(at.shape(source)) != 1:
        return {}
    # (x, dim, descending)
    if any(arg is True for arg in op.args) or dict(op.kwargs).get("descending"):
        return {}
    places = op.outputs[-1]
    before = at.known.get(source)
    if isinstance(before, Order) and before.divided == 1:
        found: dict[str, Known] = {places: Inverse(sort=before.sort)}
        return found | ({op.outputs[0]: Numbers()} if len(op.outputs) > 1 else {})
    if before is not None or "int" not in at.tensors[source].dtype:
        return {}
    found = {places: Order(sort=places)}
    return found | ({op.outputs[0]: InOrder(sort=places)} if len(op.outputs) > 1 else {})


def _divided(at: Following) -> Known | None:
    """The rows that copies are of."""
    order, number = at.of(at.op.args[0]), at.op.args[1]
    if not isinstance(order, Order) or order.divided != 1 or type(number) is not int:
        return None
    is_floor = packet_of(at.op.target) == "floor_divide" or at.arg(2, "rounding_mode") in (
        "floor",
        "trunc",
    )
    return Order(sort=order.sort, divided=number) if is_floor and number > 0 else None


def _reshaped(at: Following) -> Known | None:
    """An order or a weight with dims of size 1 beside; counts, blanks and ones as they are."""
    known = at.of(at.op.args[0])
    if isinstance(known, Blank | Ones | Numbers):
        return known
    if isinstance(known, Order | InOrder | Inverse | Counts):
        long = [size for size in at.made.shape if size != 1]
        return known if len(long) <= 1 else None
    return None


def _expanded(at: Following) -> Known | None:
    """An order repeated along the columns of what it takes."""
    order = at.of(at.op.args[0])
    rows = at.shape(at.op.inputs[0])
    is_column = len(rows) == 2 and rows[1] == 1 and at.made.shape[0] == rows[0]
    return order if isinstance(order, Order | Inverse) and is_column else None


# ------------------------------------------------------------------------------------ counts


def _histogram(at: Following) -> Known | None:
    """`histc` with a bin for each number."""
    experts = experts_of(at, at.op.inputs[0])
    number = at.arg(1, "bins", 100)
    if experts is None or (at.arg(2, "min", 0), at.arg(3, "max", 0)) != (0, number - 1):
        return None
    return Counts(experts=experts[0], number=number, sort=experts[1])


def _hits(at: Following) -> Known | None:
    """`one_hot`, or a comparison with 0, 1, 2 ... along a last dim."""
    if packet_of(at.op.target) == "one_hot":
        experts, number = experts_of(at, at.op.inputs[0]), at.arg(1, "num_classes", -1)
    else:
        if len(at.op.inputs) != 2 or not isinstance(at.known.get(at.op.inputs[1]), Numbers):
            return None
        (*before, last), numbers = at.shape(at.op.inputs[0]), at.shape(at.op.inputs[1])
        if last != 1 or not before or len(numbers) != 1:
            return None
        experts, number = experts_of(at, at.op.inputs[0]), numbers[0]
    if experts is None or type(number) is not int or at.made.shape[-1] != number:
        return None
    return Hits(experts=experts[0], number=number, sort=experts[1])


def _summed_hits(at: Following) -> Known | None:
    hits, dims = at.of(at.op.args[0]), at.arg(1, "dim", ())
    if not isinstance(hits, Hits) or at.made.shape != (hits.number,):
        return None
    rank = len(at.shape(at.op.inputs[0]))
    dims = (dims,) if type(dims) is int else dims
    if {dim % rank for dim in dims} != set(range(rank - 1)):
        return None
    return Counts(experts=hits.experts, number=hits.number, sort=hits.sort)


def _ones_added(at: Following) -> Known | None:
    """Ones added to zeros where numbers say."""
    if len(at.op.inputs) != 3 or at.arg(1, "dim") not in (0, -1) or len(at.made.shape) != 1:
        return None
    zeros, places, ones = (at.known.get(name) for name in at.op.inputs)
    if zeros != Blank(zeros=True) or not isinstance(ones, Ones) or at.op.kwargs:
        return None
    experts, (number,) = experts_of(at, at.op.inputs[1]), at.made.shape
    is_whole = at.shape(at.op.inputs[1]) == at.shape(at.op.inputs[2])
    if experts is None or not is_whole or type(number) is not int or places is not None:
        return None
    return Counts(experts=experts[0], number=number, sort=experts[1])


def _summed_up(at: Following) -> Known | None:
    counts = at.of(at.op.args[0])
    if not isinstance(counts, Counts) or counts.summed or len(at.made.shape) != 1:
        return None
    return Counts(experts=counts.experts, number=counts.number, summed=True, sort=counts.sort)


def _cast(at: Following) -> Known | None:
    known = at.of(at.op.args[0])
    if isinstance(known, Counts | InOrder | Order | Inverse | Ones | Numbers | Blank | Hits):
        same = keeps_numbers(at.op, at.tensors) or isinstance(known, Ones | Blank | Hits)
        return known if same else None
    return None


# ------------------------------------------------------------------------------------ makers


def _arange(at: Following) -> Known | None:
    return Numbers() if len(at.op.args) == 1 else None


def _filled(at: Following) -> Known | None:
    packet = packet_of(at.op.target)
    if packet in ("full", "new_full", "full_like"):
        number = at.op.args[-1]
        return Ones() if number == 1 else Blank(zeros=True) if number == 0 else None
    if "ones" in packet:
        return Ones()
    return Blank(zeros="zeros" in packet)


def _numbers_put(at: Following) -> Known | None:
    """0, 1, 2 ... put to where an order says: where each copy is now."""
    packet = packet_of(at.op.target)
    if packet == "index_put":
        places, values = at.op.args[1], at.op.args[2]
        places = places[0] if isinstance(places, tuple) and len(places) == 1 else None
        if at.arg(3, "accumulate", False):
            return None
    elif at.arg(1, "dim") in (0, -1):
        places, values = at.op.args[2], at.op.args[3]
    else:
        return None
    order = at.of(places)
    is_blank = isinstance(at.of(at.op.args[0]), Blank)
    if not is_blank or not isinstance(order, Order) or order.divided != 1:
        return None
    if len(at.made.shape) != 1 or at.made.shape != at.shape(places):
        return None
    is_numbers = isinstance(at.of(values), Numbers) and isinstance(values, Ref)
    same = is_numbers and at.shape(values) == at.made.shape
    return Inverse(sort=order.sort) if same else None


_MAKERS = (
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
    *("empty", "empty_like", "new_empty", "full", "full_like", "new_full"),
)

_RULES: dict[str, tuple[Callable[[Following], Known | None], ...]] = {
    "floor_divide": (_divided,),
    "div": (_divided,),
    "histc": (_histogram,),
    "one_hot": (_hits,),
    "eq": (_hits,),
    "sum": (_summed_hits,),
    "scatter_add": (_ones_added,),
    "index_add": (_ones_added,),
    "cumsum": (_summed_up,),
    "to": (_cast,),
    "_to_copy": (_cast,),
    "arange": (_arange,),
    "index_put": (_numbers_put,),
    "index_copy": (_numbers_put,),
    "scatter": (_numbers_put,),
    "expand": (_expanded,),
    **dict.fromkeys(RESHAPED, (_reshaped,)),
    **dict.fromkeys(_MAKERS, (_filled,)),
}
