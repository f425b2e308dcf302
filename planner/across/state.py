"""What is known of a tensor along the samples of its batch."""

from __future__ import annotations

from dataclasses import dataclass

from planner.layout.placement import Shard

IN_ORDER = ""
"""The order of rows in which the batch came."""
ANY_ORDER = "*"
"""Rows that are what they are in every order: all equal, or each its own number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a tensor of the whole batch follows from those of the batch's parts.

    Without `rows` and `sums` it is the same whatever the batch holds. With n samples the tensor is
    n**power as large as `rows` and `sums` say.
    """

    rows: Shard | None = None
    """The dim along which samples lie: a part of the batch has its part of the rows."""
    order: str = IN_ORDER
    """The order of the rows."""
    points: str | None = None
    """The order of other rows whose numbers the entries are: of indices of `argsort`, the row is a
    place in the new order, the entry a place in the old one."""
    each: int = 0
    """How many of those other rows a sample has."""
    equal: bool = False
    """All rows hold the same."""
    sums: tuple[str, ...] = ()
    """Ops that summed over samples: the whole is the average of the parts' tensors."""
    bounded: bool = False
    """A sum that was kept from zero, as a divisor."""
    shares: tuple[str, ...] = ()
    """Ops that summed what the sum was divided by."""
    lost: bool = False
    """It comes from samples by an op that has a fault, and can't be followed."""
    power: int = 0
    """The exponent of the number of samples in the tensor's size."""

    @property
    def is_number(self) -> bool:
        """Whether each row is just its own number, as `arange` over samples makes."""
        return self.points == ANY_ORDER


WHOLE = State()
"""A tensor that no sample changes: a weight, a mask of positions."""
