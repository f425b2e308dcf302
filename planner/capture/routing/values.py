"""What is known of a value of routing, without its numbers.

r rows have k copies each, one for each of their experts; a sort of the r k experts' numbers gives
the copies' order. `sort` is the name of the op that sorts.

    Order      places in the order before: of copies, or of rows (divided by k)
    InOrder    the experts of copies, sorted
    Inverse    places in the new order, of copies in the order before
    Counts     how many copies each expert has; Ends: their running sums
    Rows       a row for each copy, in the new order
    Weights    a weight for each copy, in the new order
    Biases     the bias of each copy's expert, in the new order
    Weighted   rows times weights
    Back       rows (or weighted ones) in the order before
    Summed     sums of these over the copies of a row

    Numbers    0, 1, 2 ...; Blank: a tensor that is written over, or zeros; Ones; Repeated: rows, k
               times each; Hits: ones where a copy has an expert, by copy and expert
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.language.graph import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Where each copy was, [r k], or which row it is a copy of (`divided` by k)."""

    sort: str
    divided: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder:
    """The experts' numbers, sorted, [r k]."""

    sort: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """Where each copy is now, [r k]."""

    sort: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many copies each expert has, or, `summed` up, where its run ends."""

    experts: str
    """The tensor of experts' numbers that was counted."""
    number: int
    """Of experts."""
    summed: bool = False
    sort: str | None = None
    """The sort whose values were counted; None where they were counted as they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """One where a copy has an expert, else 0, [..., e]."""

    experts: str
    number: int
    sort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A row for each copy, in the new order, [r k, ...]."""

    sort: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A weight for each copy, in the new order, [r k] or [r k, 1]."""

    sort: str
    of: str
    """The weights in the order before."""
    casts: tuple[Op, ...] = ()
    """Casts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """The bias of each copy's expert, in the new order, [r k, n]."""

    sort: str
    of: str
    """Biases by expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """Rows times their weights, in the new order."""

    sort: str
    rows: str
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Copies in the order before, [r k, h] or [r, k, h]; `summed`: sums over the k, [r, h]."""

    sort: str
    rows: str
    """The rows in the new order."""
    casts: tuple[Op, ...] = ()
    """Casts of the rows, before they are weighted."""
    weights: Weights | None = None
    copies: int = 1
    """k where copies are summed."""
    split: int = 0
    """k where they lie [r, k, h]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """0, 1, 2 and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """Zeros, or a tensor without values yet."""

    zeros: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ones:
    """Ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Each row of a tensor so often, one after the other, [r k, h]; [r, k, h] before."""

    of: str
    times: int


Known = (
    Order | InOrder | Inverse | Counts | Hits | Rows | Weights | Biases | Weighted | Back
    | Numbers | Blank | Ones | Repeated
)  # fmt: skip


def sort_of(known: Known | None) -> str | None:
    """Return the sort that a value follows from, if its numbers mean something beside it alone."""
    return getattr(known, "sort", None)
