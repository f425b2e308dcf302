"""What is known of a tensor along the samples of its batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.language.graph import SAMPLES, Affine, TensorMeta, Unit
from planner.language.graph.mixing import Kind
from planner.language.layout.placement import Shard

IN_ORDER = ""
"""The order of rows in which the batch came."""
ANY_ORDER = "*"
"""Rows that are what they are in every order: all equal, or each its own number."""

# The share of a part in a mean over samples is SAMPLES: its samples by those of the batch.
ADDED = "added"
"""The share of a part in a sum over samples: each part's sum counts once."""
SCALED = "scaled"
"""Parts whose values have their shares in them already (several in one sum): each counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a tensor of the whole batch follows from those of the batch's parts.

    Without `rows`, `sums` and `loose` it is the same in the whole batch and in its parts. With
    `sums` it is the sum of the parts' tensors, each times the share that `share` names.
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
    """Ops that summed over samples."""
    share: str = SAMPLES
    """Of `sums`: SAMPLES, ADDED, SCALED, or the op (``block:op``) whose labels that count are
    those of the share."""
    terms: tuple[str, ...] = ()
    """Of a SCALED sum: the shares and divisors that are in it, each a `share` or the name of a
    value of the whole batch."""
    pure: bool = False
    """It is made of the batch, of constants and of buffers that stay as they are: no parameter
    reaches it, and nothing is drawn. It can be made of the whole batch before a step begins."""
    loose: str = ""
    """The op (``block:op``) that made a pure tensor across samples: parts do not give it."""
    loose_kind: Kind = "mixed"
    """What that op did."""
    whole: str = ""
    """The name of the value of the whole batch that it is."""
    lost: bool = False
    """It comes from samples by an op that has a fault, and can't be followed."""

    @property
    def is_number(self) -> bool:
        """Whether each row is just its own number, as `arange` over samples makes."""
        return self.points == ANY_ORDER

    @property
    def is_whole(self) -> bool:
        """Whether it is the same in the whole batch and in its parts."""
        return not (self.rows or self.sums or self.loose or self.lost)


WHOLE = State()
"""A tensor that no sample changes: a weight."""
CONSTANT = State(pure=True)
"""One that no parameter reaches either: a mask of positions."""


def growing_dims(tensor: TensorMeta) -> list[int]:
    """Return the dims of a tensor whose size grows with the batch."""
    return [d for d, s in enumerate(tensor.shape) if isinstance(s, Affine) and s.per_sample]


def lies(tensor: TensorMeta, unit: Unit) -> Shard | None:
    """Return where a tensor has the samples of the batch, as the batch's own tensors have them: in
    several runs where those that belong together lie apart; None where it does not grow.
    """
    for dim in growing_dims(tensor)[:1]:
        size = tensor.shape[dim]
        assert isinstance(size, Affine)
        return Shard(dim, unit.runs_of(size.per_sample))
    return None


def joined_sums(states: Iterable[State]) -> tuple[str, ...]:
    """Return the ops that summed over samples what tensors come from."""
    return tuple(dict.fromkeys(cause for state in states for cause in state.sums))


def joined_terms(states: Iterable[State]) -> tuple[str, ...]:
    """Return what is in a sum of SCALED and other sums."""
    found: dict[str, None] = {}
    for state in states:
        found |= dict.fromkeys(state.terms if state.share == SCALED else (state.share,))
    return tuple(sorted(found))


def summed(states: Iterable[State]) -> State:
    """Return the state of a sum of sums whose shares agree, or are in them already."""
    states = tuple(states)
    shares = {state.share for state in states}
    if len(shares) == 1 and SCALED not in shares:
        return State(sums=joined_sums(states), share=shares.pop())
    return State(sums=joined_sums(states), share=SCALED, terms=joined_terms(states))
