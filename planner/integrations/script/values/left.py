"""Tensors that a model's forward leaves behind: in an attribute, in what a hook keeps.

A script may read them (an auxiliary loss that the model keeps as `self.aux`). Under a plan the
forward that the script calls runs without values, on a copy of the model, so there is nothing to
read: what was left is a stand-in, and its use is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from planner.errors import PlanError

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_plain_inside = 0
"""How many forwards without values run: what a forward before has left is theirs to use."""


class Left(Tensor):
    """A tensor that a forward left behind. Its class is set where it is found, so it is whatever
    holds it.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _plain_inside:
            refuse_left()
        return super().__torch_function__(func, types, args, kwargs or {})


def refuse_left() -> NoReturn:
    """Raise PlanError: a script uses what a forward left behind."""
    raise PlanError(
        "the script uses a tensor that the model's forward leaves behind, in an attribute or "
        "through a hook, and the engine computes what forward returns; return it from forward, and "
        "take it from there"
    )


@contextmanager
def as_plain() -> Iterator[None]:
    """Inside, what was left may be used as any tensor without values."""
    global _plain_inside
    _plain_inside += 1
    try:
        yield
    finally:
        _plain_inside -= 1


class Attributes:
    """What forward sets in attributes of a model's modules, other than parts and weights.

    Mutable: `own`, what the script's model had there, where something else stands for it.
    """

    def __init__(self, model: nn.Module, copied: nn.Module) -> None:
        """`copied` is the copy of `model` whose forward runs in its place."""
        others = dict(copied.named_modules())
        self._pairs = [
            (part.__dict__, others[name].__dict__)
            for name, part in model.named_modules()
            if name in others
        ]
        self._before = [_told(copy) for _, copy in self._pairs]
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    def show(self) -> None:
        """Give the script's model what its copy's forward has left."""
        self.take_back()
        for (held, copy), before in zip(self._pairs, self._before, strict=True):
            for key, told in _told(copy).items():
                if told != before.get(key) and any(isinstance(t, Left) for t in _leaves(copy[key])):
                    self._own.append((held, key, held.get(key, _NOTHING)))
                    held[key] = copy[key]

    def take_back(self) -> None:
        """Give the script's model what it had."""
        for held, key, value in reversed(self._own):
            if value is _NOTHING:
                held.pop(key, None)
            else:
                held[key] = value
        self._own = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the script's model has what it had."""
        shown = [(held, key, held[key]) for held, key, _ in self._own if key in held]
        own = self._own
        self.take_back()
        try:
            with as_plain():
                yield
        finally:
            for held, key, value in shown:
                held[key] = value
            self._own = own


_NOTHING = object()


def _told(held: dict[str, Any]) -> dict[str, list[int]]:
    """Return which objects lie in each attribute."""
    return {
        key: [id(value), *map(id, _leaves(value))]
        for key, value in held.items()
        if key not in _STANDARD
    }


def _leaves(value: Any, depth: int = 4) -> Iterable[Any]:
    """Yield what lies in containers."""
    if depth and isinstance(value, list | tuple | set):
        for each in value:
            yield from _leaves(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each, depth - 1)
    else:
        yield value
