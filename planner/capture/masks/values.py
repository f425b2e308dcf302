"""What is known of a value that a mask is made of, without its numbers.

    Constant     one number everywhere
    Along        a number for each place along one dim: the place itself, or what a table says
    Difference   a query's place less a key's
    Pattern      true where a query may look at a key
    Denied       true where it may not
    Additive     0 where it may, and so low a number elsewhere that its weight is 0

Dims count from the end, so that they stay where a value is expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number, or truth as 0 or 1, at every place."""

    value: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """A number for each place along a dim, and for each sample where a table says it."""

    dim: int
    """The dim of the places, from the end: -1 is the last."""
    size: int | None
    """Places; None where they are the samples of a batch."""
    table: str | None = None
    """The tensor that has the numbers, of samples and places; None for the places themselves."""
    sample: int | None = None
    """The dim of the samples, from the end; None where no sample differs."""
    add: int = 0
    """Added to each number."""
    divided_by: int = 1
    """Each number is then divided, and rounded down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first number along a dim, with something added."""

    of: Along
    add: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """By how much a table's numbers go up from the place before; 1 at the first place."""

    of: Along


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaks:
    """Where a table's numbers do not go up by one."""

    of: Along


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A query's number less a key's, or its amount."""

    query: Along
    key: Along
    is_negative: bool = False
    """It is the key's less the query's."""
    add: int = 0
    """Added to it."""
    is_amount: bool = False
    """Its sign is lost."""


Bounds = tuple[int | None, int | None]
"""The least and the most that a query's number may be ahead of a key's; None for no limit."""

FREE: Bounds = (None, None)


class Dims(NamedTuple):
    """Dims of a pattern, from the end; None where a dim does not matter."""

    query: int | None = None
    key: int | None = None
    sample: int | None = None


ANYWHERE = Dims()
"""No dim matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Which keys a query may look at: those for which all of this holds."""

    ahead: Bounds = FREE
    """Bounds of the query's place less the key's: (0, None) is causal."""
    chunk: int | None = None
    """Both are in the same run of so many places."""
    same: frozenset[str] = frozenset()
    """Tables that have the same number at both places."""
    keys: frozenset[str] = frozenset()
    """Tables of truth that are true at the key's place."""
    table_ahead: tuple[tuple[str, Bounds], ...] = ()
    """Bounds of a table's number at the query less that at the key, by table."""
    dims: Dims = ANYWHERE
    """The dims of queries, keys and samples."""

    @property
    def is_full(self) -> bool:
        """Whether every query looks at every key."""
        return replace(self, dims=ANYWHERE) == Pattern()

    @property
    def allows_itself(self) -> bool:
        """Whether each query looks at its own place, whatever tables say."""
        low, high = self.ahead
        within = (low is None or low <= 0) and (high is None or high >= 0)
        tables = all(
            (least is None or least <= 0) and (most is None or most >= 0)
            for _, (least, most) in self.table_ahead
        )
        return within and tables and not self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """True where a pattern does not hold."""

    pattern: Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Additive:
    """What is added to scores: 0 where a pattern holds, elsewhere so low that no weight is left."""

    pattern: Pattern


Known = Constant | Along | First | Steps | Breaks | Difference | Pattern | Denied | Additive


def both(first: Pattern, second: Pattern) -> Pattern | None:
    """Return where two patterns hold; None where their dims differ or chunks do."""
    # A dim that does not matter to a pattern (None) agrees with any.
    dims = [{*pair} - {None} for pair in zip(first.dims, second.dims, strict=True)]
    if any(len(found) > 1 for found in dims):
        return None
    chunks = {first.chunk, second.chunk} - {None}
    if len(chunks) > 1:
        return None
    tables = dict(first.table_ahead)
    for table, bounds in second.table_ahead:
        tables[table] = narrower(tables.get(table, FREE), bounds)
    return Pattern(
        ahead=narrower(first.ahead, second.ahead),
        chunk=next(iter(chunks), None),
        same=first.same | second.same,
        keys=first.keys | second.keys,
        table_ahead=tuple(sorted(tables.items(), key=lambda item: item[0])),
        dims=Dims(*(next(iter(found), None) for found in dims)),
    )


def opposite(pattern: Pattern) -> Pattern | None:
    """Return where a pattern does not hold, if that is one: it has one bound and nothing else."""
    low, high = pattern.ahead
    if replace(pattern, ahead=FREE, dims=pattern.dims._replace(query=None, key=None)) != Pattern():
        return None
    if high is None and low is not None:
        return replace(pattern, ahead=(None, low - 1))
    if low is None and high is not None:
        return replace(pattern, ahead=(high + 1, None))
    return None


def narrower(first: Bounds, second: Bounds) -> Bounds:
    """Return the bounds that two pairs of bounds leave."""
    low, high = (
        [each for each in pair if each is not None] for pair in zip(first, second, strict=True)
    )
    return max(low, default=None), min(high, default=None)


def moved(value: Known, at: int) -> Known | None:
    """Return a value after a dim of size 1 was put in; `at` is its place from the end, after."""

    # Dims count from the end: those at or before the new dim are a place farther now.
    def shift(dim: int | None) -> int | None:
        return dim if dim is None or dim > at else dim - 1

    if isinstance(value, Constant):
        return value
    if isinstance(value, Along):
        return replace(value, dim=value.dim - (value.dim <= at), sample=shift(value.sample))
    if isinstance(value, Pattern):
        return replace(value, dims=Dims(*map(shift, value.dims)))
    if isinstance(value, Denied | Additive):
        pattern = moved(value.pattern, at)
        assert isinstance(pattern, Pattern)
        return replace(value, pattern=pattern)
    return None
