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

    Without `rows` and `sums` it is the same whatever the batch holds. `rows` is the dim along
    which samples lie, so that a part of the batch has its part of the rows. `sums` are the ops
    that summed over samples: then the whole is what the parts' tensors come to on average.
    Both hold up to a factor: with n samples the tensor is n**power as large as they say.

    `order` names the order of the rows, `points` the order of other rows whose numbers the
    entries are (indices of `argsort`: the row they lie in is a place in the new order, the
    entry a place in the old one), `each` how many of those other rows a sample has. Rows that
    hold the same for every sample are `equal`. A sum that is `bounded` was kept from zero, as a
    divisor; `shares` are the ops that summed what it was divided by. What is `lost` comes from
    samples by an op that was blamed for it, and can't be followed.
    """

    rows: Shard | None = None
    order: str = IN_ORDER
    points: str | None = None
    each: int = 0
    equal: bool = False
    sums: tuple[str, ...] = ()
    bounded: bool = False
    shares: tuple[str, ...] = ()
    lost: bool = False
    power: int = 0

    @property
    def is_number(self) -> bool:
        """Whether each row is just its own number, as `arange` over samples makes."""
        return self.points == ANY_ORDER


WHOLE = State()
"""A tensor that no sample changes: a weight, a mask of positions."""
