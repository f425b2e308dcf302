"""Comparisons of positions and of what tables say: which places a query may look at."""

from __future__ import annotations

from planner.capture.masks.values import (
    FREE,
    Along,
    Bounds,
    Constant,
    Denied,
    Difference,
    Dims,
    Known,
    Pattern,
)

TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
"""What a comparison is with its sides exchanged."""

_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}


def compared(packet: str, first: Along, second: Along) -> Known | None:
    """Return where two values along two dims compare: the later dim is that of keys."""
    if first.dim == second.dim or (first.table, first.sample) != (second.table, second.sample):
        return None
    if first.divided_by != second.divided_by or not _are_sequences(first, second):
        return None
    if first.dim > second.dim:
        return compared(TURNED[packet], second, first)
    if packet == "ne":
        equal = compared("eq", first, second)
        return Denied(pattern=equal) if isinstance(equal, Pattern) else None
    query, key = first, second
    dims = Dims(query.dim, key.dim, query.sample)
    if packet == "eq" and query.add == key.add == 0:
        if query.table is None and query.divided_by > 1:
            return Pattern(chunk=query.divided_by, dims=dims)
        if query.table is not None and query.divided_by == 1:
            return Pattern(same=frozenset((query.table,)), dims=dims)
    if query.divided_by > 1:
        return None
    # query + query.add <= key + key.add: query - key is at most the difference of what is added.
    bounds = _bounds(packet, key.add - query.add)
    if query.table is None:
        return Pattern(ahead=bounds, dims=dims)
    return Pattern(table_ahead=((query.table, bounds),), dims=dims)


def _are_sequences(*values: Along) -> bool:
    return all(value.size is not None and value.size > 1 for value in values)


def compared_to_number(packet: str, value: Known | None, number: int | float) -> Known | None:
    """Return where a value compares with a number as an op says."""
    if isinstance(value, Constant):
        return Constant(value=int(_holds(packet, value.value, number)))
    if not isinstance(number, int):
        return None
    if isinstance(value, Along) and value.table is None and value.size and value.divided_by == 1:
        # Positions rise along the dim, so what holds at both ends holds between them; equality may
        # not.
        ends = {_holds(packet, end + value.add, number) for end in (0, value.size - 1)}
        return Constant(value=int(ends.pop())) if len(ends) == 1 and packet not in _EQUALS else None
    return _difference_to_number(packet, value, number) if isinstance(value, Difference) else None


_EQUALS = ("eq", "ne")


def _difference_to_number(packet: str, value: Difference, number: int) -> Known | None:
    query, key = value.query, value.key
    dims = Dims(query.dim, key.dim, query.sample)
    # d: query's place less key's. The value is d + inner + value.add, or its negative before the
    # sum.
    inner = query.add - key.add  # places differ by so much less than the value
    if value.is_amount:
        if packet in ("gt", "ge"):
            near = _difference_to_number(_OPPOSITE[packet], value, number)
            return Denied(pattern=near) if isinstance(near, Pattern) else None
        if packet not in ("le", "lt"):
            return None
        most = number - (packet == "lt")
        # The amount of d + inner is at most `most`.
        bounds: Bounds = (-most - inner, most - inner)
    elif value.is_negative:
        # value.add - (d + inner) compared with the number, solved for d: the comparison turns
        # round.
        bounds = _bounds(TURNED[packet], value.add - number - inner)
    else:
        bounds = _bounds(packet, number - value.add - inner)
    if bounds == FREE:
        return None
    if query.table is None:
        return Pattern(ahead=bounds, dims=dims)
    return Pattern(table_ahead=((query.table, bounds),), dims=dims)


def _bounds(packet: str, number: int) -> Bounds:
    """Return the bounds of a number that compares with another as an op says."""
    return {
        "le": (None, number),
        "lt": (None, number - 1),
        "ge": (number, None),
        "gt": (number + 1, None),
        "eq": (number, number),
    }.get(packet, FREE)


def _holds(packet: str, first: int | float, second: int | float) -> bool:
    return {
        "le": first <= second,
        "lt": first < second,
        "ge": first >= second,
        "gt": first > second,
        "eq": first == second,
        "ne": first != second,
    }[packet]
