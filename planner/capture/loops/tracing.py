"""A loop over experts traced as if each had rows, of a number that nobody may compute with.

A loop picks each expert's rows by values: `torch.where(chosen == expert)`, ``x[mask]``. Traced,
what is picked has `ROWS` rows, and an op of ours, ``planner::rows_of_mask``, stands where it is
picked. That is the loop's own course as long as it does the same with an expert's rows however many
they are, so a forward may see of their number only whether it is none. A loop that passes over
experts without rows does for them what it would do for none: nothing is added. (That a parameter
then has no gradient is kept: `LoopTracing.passes_over`.)

What the ops amount to is looked at in `planner.capture.loops.fuse`; where they are no such loop,
none of what is made here stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from planner.capture.diagnose import first_line
from planner.errors import CaptureError

ROWS = 999_983
"""Rows of each expert in a trace: a prime, and so no size of a model's own."""

torch.library.define("planner::rows_of_mask", "(Tensor mask, Tensor[] hits, int rows) -> Tensor[]")

_OTHERS = (1, 2, 3)
"""Numbers of rows for which a forward must take the same course."""


@torch.library.register_fake("planner::rows_of_mask")
def _(mask: Tensor, hits: list[Tensor], rows: int) -> list[Tensor]:
    return [mask.new_empty((rows,), dtype=torch.int64) for _ in range(mask.dim())]


class NotALoop(CaptureError):
    """A forward does more than a loop over experts may. `kind` is its module's class."""

    def __init__(self, kind: type[nn.Module], why: str) -> None:
        super().__init__(f"{kind.__qualname__} is no loop over experts that is recognised: {why}")
        self.kind, self.why = kind, why


class _Refused(Exception):
    """A forward computes with the number of an expert's rows; not an error of its own."""


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refused(*_: Any) -> NoReturn:
        raise _Refused(f"{what} of the number of an expert's rows")

    return refused


class NumRows(int):
    """How many rows an expert has: it may be passed on as a size, and compared with none."""

    told: Callable[[], bool]
    """Notes that it was compared with none; returns whether it is more."""

    @classmethod
    def of(cls, rows: int, told: Callable[[], bool]) -> NumRows:
        """Return a number whose comparisons are told."""
        made = cls(rows)
        made.told = told
        return made

    __hash__ = int.__hash__

    def _are_some(self, other: Any, *, than: int) -> bool:
        if type(other) is not int or other != than:
            _refuse("a comparison")()
        return self.told()

    def __eq__(self, other: Any) -> bool:
        # (Shapes are compared with each other.)
        if isinstance(other, NumRows):
            return True
        return not self._are_some(other, than=0)

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __gt__(self, other: Any) -> bool:
        return self._are_some(other, than=0)

    def __ge__(self, other: Any) -> bool:
        return self._are_some(other, than=1)

    def __lt__(self, other: Any) -> bool:
        return not self._are_some(other, than=1)

    def __le__(self, other: Any) -> bool:
        return not self._are_some(other, than=0)

    def __bool__(self) -> bool:
        return self._are_some(0, than=0)

    __int__ = __float__ = __round__ = _refuse("a conversion")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse("a sum or product")
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse("a part")
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __neg__ = _refuse("a part")


class Hit(int):
    """The number of an expert that a loop over those that were chosen comes to.

    Mutable: `dims`, of the tensor that it stands for: 1 where that is a row of `nonzero`.
    """

    dims = 0

    @classmethod
    def of(cls, number: int, dims: int) -> Hit:
        """Return the number of an expert, as of a tensor of so many dims."""
        made = cls(number)
        made.dims = dims
        return made

    def __getitem__(self, index: Any) -> Hit:
        if index not in (0, -1) or not self.dims:
            raise IndexError(index)
        return Hit.of(self, self.dims - 1)

    def __iter__(self) -> Iterator[Hit]:
        return iter([self[0]] if self.dims else ())

    def item(self) -> int:
        """Return the number, as of a tensor."""
        return int(self)

    def squeeze(self, *_: int) -> Hit:
        """Return it without dims."""
        return Hit.of(self, 0)

    def tolist(self) -> Any:
        """Return the number, or a list of it."""
        return [int(self)] if self.dims else int(self)

    def _same(self, *_: Any, **__: Any) -> Hit:
        return self

    to = cpu = long = int = detach = _same


class Hits(list[Hit]):
    """The experts that were chosen, one after the other. `each` is gone through instead."""

    each: Callable[[Hits], Iterator[Hit]]

    @classmethod
    def of(cls, hits: Iterable[Hit], each: Callable[[Hits], Iterator[Hit]]) -> Hits:
        """Return experts whose loop is told."""
        made = cls(hits)
        made.each = each
        return made

    def __iter__(self) -> Iterator[Hit]:
        return self.each(self)

    def _flat(self, *_: int) -> Hits:
        return Hits.of((hit.squeeze() for hit in list.__iter__(self)), self.each)

    squeeze = flatten = view = reshape = _flat

    def tolist(self) -> Hits:
        """Return the numbers, as of a tensor."""
        return self


_COUNTED = frozenset({"sum", "bincount", "count_nonzero"})
_ABOVE_NONE = {"gt": 0, "greater": 0, "__gt__": 0, "ne": 0, "not_equal": 0, "__ne__": 0, "ge": 1}
_NUMBERS = frozenset({"numel", "nelement"})
_LOOKS = frozenset({"__get__", "size", "dim", "__len__", *_NUMBERS})
_NUMERIC = (bool, int, float, str, NumRows, Hit)
Empty = Literal["none", "first", "all"]


class LoopTracing(TorchFunctionMode):
    """Runs a forward so. Mutable: what it holds grows.

    Attributes:
        looks: whether the forward looks at how many rows there are.
        picks: how often rows were picked.
        calls: the functions that it called, with the numbers and parameters that these were given.
        picks_of_first: how many of them for the first expert of those that were chosen.
        last_look: how many calls it had made when it last looked.
        last_own: how many when it last called one with an expert's rows.
    """

    def __init__(self, rows: int = ROWS, *, empty: Empty = "none", but: int = 0) -> None:
        """Experts that are `empty` have no rows, where the forward looks whether they have some:
        all, or the first one that it looks at. All `but` so many of the experts that are counted
        have some.
        """
        super().__init__()
        self.looks, self.picks = False, 0
        self.calls: list[tuple[Any, ...]] = []
        self.last_look = self.last_own = 0
        self._rows, self._empty, self._but = rows, empty, but
        self.picks_of_first = 0
        self._first: int | None = None
        self._passed_over: set[int] = set()
        self._places: dict[int, list[Tensor]] = {}
        self._owner: dict[int, int] = {}
        self._counts: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []
        self._hits: list[Tensor] = []
        self._within: int | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _LOOKS:
            given = _flat((args, tuple(kwargs.values())))
            told = (each for each in map(_told, given) if each is not None)
            self.calls.append((name, *told))
        made = self._called(func, name, args, kwargs)
        if name not in _LOOKS and any(
            id(each) in self._owner for each in _flat((args, tuple(kwargs.values()), made))
        ):
            self.last_own = len(self.calls)
        return made

    def _called(self, func: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None:
            if name == "where" and len(args) == 1 and not kwargs:
                return tuple(self._picked(tensor))
            if name == "nonzero":
                return self._nonzero(tensor, *args[1:], **kwargs)
            if name == "any" and len(args) == 1 and not kwargs and id(tensor) not in self._owner:
                return self._are_any(tensor)
            if name == "__getitem__":
                places = self._index(tensor, args[1])
                return self._note(func, func(tensor, places), (tensor, places))
            if name == "__setitem__":
                return func(tensor, self._index(tensor, args[1]), args[2])
            if self._has_rows(tensor):
                dim = args[1] if name == "size" and len(args) == 2 else None
                # (A property is another object each time.)
                is_shape = func == Tensor.shape.__get__ or (name == "size" and len(args) == 1)  # type: ignore[attr-defined]
                if is_shape and not kwargs:
                    return tuple(self._number(tensor, size) for size in tensor.shape)
                if type(dim) is int:
                    return self._number(tensor, tensor.shape[dim])
                if name == "__len__" and tensor.shape[0] == self._rows:
                    # (Python makes an ordinary number of it, which tells of no comparison.)
                    return self._rows if self._looked(self._owner_of(tensor)) else 0
                if name in _NUMBERS and tensor.dim() == 1:
                    return self._number(tensor, tensor.shape[0])
                if name in _NUMBERS or name == "size":
                    raise _Refused("a count of the entries of an expert's rows")
        return self._note(func, func(*args, **kwargs), args)

    # ------------------------------------------------------------------------------ picking

    def _picked(self, mask: Tensor) -> list[Tensor]:
        """Return where a mask is not zero."""
        if id(mask) not in self._places:
            places = torch.ops.planner.rows_of_mask(mask, self._hits, self._rows)
            self._places[id(mask)] = places
            self._alive += [mask, *places]
            self._owner |= {id(each): id(mask) for each in places}
            self.picks += 1
            if self._hits:
                self._passed_over.add(id(mask))
        return self._places[id(mask)]

    def _nonzero(self, tensor: Tensor, *, as_tuple: bool = False) -> Any:
        counts = self._counts.get(id(tensor))
        if as_tuple and counts is None:
            return tuple(self._picked(tensor))
        if counts is not None and counts is not tensor:
            # (Of numbers themselves nobody said that they are more than none.)
            self._noted_look()
            number = 0 if self._empty == "all" else len(tensor) - self._but
            numbers = range(int(self._empty == "first"), number)
            found = Hits.of((Hit.of(each, 1) for each in numbers), partial(self._each, counts))
            return (found.squeeze(),) if as_tuple else found
        if tensor.dim() == 1:
            column = self._picked(tensor)[0].unsqueeze(1)
            self._owner[id(column)] = id(tensor)
            self._alive.append(column)
            return column
        raise _Refused("places as a table")

    def _each(self, counts: Tensor, hits: Hits) -> Iterator[Hit]:
        """Go through the experts that were chosen; rows are picked for each."""
        for hit in list.__iter__(hits):
            before, calls, self._hits = self.picks, len(self.calls), [counts]
            yield hit
            self._hits = []
            self.picks_of_first = self.picks_of_first or self.picks - before
            if self.picks == before and len(self.calls) > calls:
                raise _Refused("a loop over the experts that were chosen without their rows")

    def _are_any(self, mask: Tensor) -> Any:
        self._picked(mask)  # (what depends on the answer comes behind)
        return _Answer(self._looked(id(mask)))

    def _looked(self, owner: int) -> bool:
        """Note that a forward looks whether an expert has rows; return whether it has some."""
        self._noted_look()
        self._within = owner
        self._passed_over.add(owner)
        if self._first is None:
            self._first = owner
        return self._empty == "none" or (self._empty == "first" and owner != self._first)

    def _noted_look(self) -> None:
        self.looks, self.last_look = True, len(self.calls)

    @property
    def passes_over_some(self) -> bool:
        """Whether it looks at some experts, and picks rows of others without a look."""
        return bool(self._passed_over) and not self._passed_over.issuperset(self._places)

    def _index(self, tensor: Tensor, index: Any) -> Any:
        """Return an index of places, where it had a mask or the number of an expert."""
        found: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, Hit):
                found.append(slice(each + 0, each + 1) if each.dims else each + 0)
            elif isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
                found += self._picked(each)
            else:
                found.append(each)
        return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]

    # ------------------------------------------------------------------------------ noting

    def _has_rows(self, tensor: Tensor) -> bool:
        """Whether a tensor has a dim of an expert's rows."""
        shape = tensor.shape
        return self._rows in shape and (id(tensor) in self._owner or self._rows == ROWS)

    def _owner_of(self, tensor: Tensor) -> int:
        owner = self._owner.get(id(tensor))
        if owner is None:
            raise _Refused("a look at the number of rows of which it is not known whose they are")
        return owner

    def _number(self, tensor: Tensor, size: int) -> int:
        """Return a size of a tensor, of rows so that comparisons are told."""
        if size != self._rows:
            return size

        return NumRows.of(self._rows, lambda: self._looked(self._owner_of(tensor)))

    def _note(self, func: Any, made: Any, args: Sequence[Any]) -> Any:
        """Note whose rows a result has, and whether it counts experts."""
        given = [each for each in _flat(args) if isinstance(each, Tensor)]
        owners = {self._owner[id(each)] for each in given if id(each) in self._owner}
        if owners and self._within is not None and owners != {self._within}:
            raise _Refused("rows of an expert used where another one was seen to have some")
        name = getattr(func, "__name__", "")
        for each in made if isinstance(made, tuple | list) else (made,):
            if not isinstance(each, Tensor) or any(each is other for other in given):
                continue
            if self._rows in each.shape and len(owners) == 1:
                self._owner[id(each)] = next(iter(owners))
                self._alive.append(each)
            if each.dim() == 1 and name in _COUNTED and not owners:
                self._counts[id(each)] = each
                self._alive.append(each)
            if name in _ABOVE_NONE and len(args) == 2 and args[1] is not None:
                is_above = type(args[1]) is int and args[1] == _ABOVE_NONE[name]
                if is_above and id(args[0]) in self._counts:
                    self._counts[id(each)] = self._counts[id(args[0])]
                    self._alive.append(each)
        return made


class _Answer:
    """Whether an expert has rows: nothing to compute with."""

    def __init__(self, has_some: bool) -> None:
        self._has_some = has_some

    def __bool__(self) -> bool:
        return self._has_some

    def item(self) -> bool:
        """Return it, as of a tensor."""
        return self._has_some


def _told(given: Any) -> Any:
    """Return what is told of an argument: a number, or which parameter it is."""
    if isinstance(given, nn.Parameter):
        return f"parameter {id(given)}"
    return given if type(given) in _NUMERIC else None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        # (Hits are not gone through by their loop.)
        for each in list.__iter__(value) if isinstance(value, list) else value:
            yield from _flat(each)
    else:
        yield value


@dataclass(frozen=True, kw_only=True)
class Course:
    """What is known of a loop's course.

    Attributes:
        passes_over: whether it does nothing for experts without rows.
        but: how many experts it counts that there are not, for choices of other ranks.
    """

    passes_over: bool = False
    but: int = 0


def traced(
    forward: Callable[..., Any],
    kind: type[nn.Module],
    args: Any,
    kwargs: Any,
    known: Course,
    *,
    is_checked: bool = False,
) -> tuple[Any, Course]:
    """Return what the forward of a module of class `kind` returns if each expert has rows, and its
    course as far as it is known: while ops are noted, and where it `is_checked` already, it runs
    once.

    Raises NotALoop where it computes with their number, picks none, or does for experts without
    rows what it does for no others.
    """

    def run(**how: Any) -> tuple[Any, LoopTracing]:
        tracing = LoopTracing(**how)
        with tracing:
            return forward(*args, **kwargs), tracing

    but, is_noted = known.but, get_proxy_mode() is not None
    try:
        try:
            made, full = run(but=but)
        except IndexError:
            if but or is_noted:
                raise
            but = 1
            made, full = run(but=but)
        if not full.picks:
            raise _Refused("no rows are picked")
        if is_noted or is_checked:
            return made, replace(known, but=but)
        for rows in _OTHERS:
            result, other = run(rows=rows, but=but)
            if not _alike(other.calls, full.calls, rows):
                raise _Refused("what it does depends on how many rows an expert has")
            if _numbers_in(result) != _numbers_in(made):
                raise _Refused("it returns numbers that depend on how many rows an expert has")
        if not full.looks:
            return made, replace(known, but=but)
        if full.passes_over_some:
            raise _Refused("some experts are passed over without rows, and others are not")
        _, bare = run(empty="all", but=but)
        _, short = run(empty="first", but=but)
    except Exception as error:
        raise NotALoop(kind, first_line(error)) from error
    if short.picks != full.picks - full.picks_of_first:
        raise NotALoop(kind, "an expert without rows ends the loop")
    for other in (bare, short):
        rest = iter(full.calls)
        if not all(call in rest for call in other.calls) or not _ends_alike(full, other):
            raise NotALoop(kind, "it does something else for experts without rows")
    passes_over = known.passes_over or len(bare.calls) < len(full.calls)
    return made, Course(passes_over=passes_over, but=but)


def _numbers_in(result: Any) -> list[Any]:
    """Return what a result has beside tensors, numbers of rows as whole numbers."""
    leaves = [each for each in tree_leaves(result) if not isinstance(each, Tensor)]
    return [int.__index__(each) if isinstance(each, NumRows) else each for each in leaves]


def _ends_alike(full: LoopTracing, other: LoopTracing) -> bool:
    """Whether what comes behind the last expert's rows is done without these, too: no more of it
    may depend on whether there are some.
    """
    last = max(full.last_own, full.last_look)
    end, since = full.calls[last:], other.calls[other.last_look :]
    same = len(end) <= len(since) if full.last_own > full.last_look else len(end) == len(since)
    return same and since[len(since) - len(end) :] == end


def _alike(calls: Sequence[tuple[Any, ...]], full: Sequence[tuple[Any, ...]], rows: int) -> bool:
    return len(calls) == len(full) and all(map(partial(_is_same, rows), calls, full))


def _is_same(rows: int, call: tuple[Any, ...], full: tuple[Any, ...]) -> bool:
    """Whether a call with so many rows is that with `ROWS`."""
    return len(call) == len(full) and all(
        type(a) is type(b) and (int(a) == rows if int(b) == ROWS else a == b)
        if isinstance(a, int) and not isinstance(a, NumRows)
        else isinstance(b, NumRows) if isinstance(a, NumRows) else a == b
        for a, b in zip(call, full, strict=True)
    )  # fmt: skip
