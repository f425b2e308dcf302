"""Values of tensors that neither the batch nor a weight goes into, for a forward that tests them.

A model makes some tensors of sizes alone (``torch.ones(batch, length)`` for a mask that it was not
given, ``torch.arange(length)`` for positions), and a library tests those as it tests the user's:
``mask.all()``, ``(positions.diff() != 1).any()``. Training takes the branch that their values
say. On the meta device they have none; so it is noted how each came about, and done on the CPU
when a value is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_any, tree_leaves, tree_map

_MADE = {
    **dict.fromkeys(("ones", "new_ones", "ones_like"), 1),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), 0),
}
"""Functions whose results are all of one value."""

_FOLLOWED = {
    *("arange", "all", "any", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and"),
    *("logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or", "__invert__"),
    *("__and__", "__or__", "__eq__", "__ne__", "__getitem__", "bool", "int", "long", "float"),
    *("double", "to", "add", "sub", "mul", "rsub", "__add__", "__radd__", "__sub__", "__rsub__"),
    *("__mul__", "__rmul__", "sum", "cumsum", "diff", "amax", "amin", "max", "min", "view"),
    *("reshape", "expand", "unsqueeze", "squeeze", "flatten", "repeat", "contiguous", "pad"),
    "transpose",
}
"""Functions whose results hang on nothing but what they are given."""

_SURE: dict[str, Callable[[float], bool | None]] = {
    "lt": lambda number: False if number <= 0 else True if number >= 1 else None,
    "ge": lambda number: True if number <= 0 else False if number >= 1 else None,
    "gt": lambda number: True if number < 0 else False if number >= 1 else None,
    "le": lambda number: False if number < 0 else True if number >= 1 else None,
}
"""What a comparison of any number that `rand` draws, of 0 or more and less than 1, with a number
says; None where that depends on the draw.
"""

MOST = 1 << 22
"""Entries of the largest tensor whose values are worked out."""


class Constants:
    """How tensors without values came about. Mutable: it grows with each call that is noted.

    Tensors are known by identity, and held so that an id stays their own.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._drawn: dict[int, Tensor] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Note what a call made, if its values can be worked out later."""
        name = getattr(func, "__name__", "")
        # Drawn numbers may be changed by any write; which of them is not followed.
        if self._drawn and _writes(name, kwargs):
            self._drawn.clear()
        if self._made and _writes(name, kwargs):
            if tree_any(self._is_known, (args, kwargs)):
                self._made.clear()  # what else lies in the same memory is not followed
            return
        if not isinstance(made, Tensor) or made.numel() > MOST or made.requires_grad:
            return
        if name == "rand":
            self._drawn[id(made)] = made
        elif name in _SURE and len(args) == 2 and id(args[0]) in self._drawn:
            number, shape = args[1], tuple(made.shape)
            sure = None if isinstance(number, Tensor) else _SURE[name](number)
            if sure is not None:
                self._made[id(made)] = made, lambda: torch.full(shape, sure)
        elif name in _MADE:
            value, shape, dtype = _MADE[name], tuple(made.shape), made.dtype
            self._made[id(made)] = made, lambda: torch.full(shape, value, dtype=dtype)
        elif name in _FOLLOWED:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if (given or name == "arange") and all(map(self._is_known, given)):
                self._made[id(made)] = made, self._call(func, args, kwargs, made.dtype)

    def has_values(self, tensor: Tensor) -> bool:
        """Whether a tensor's values, or what they are compared by, can be worked out."""
        return id(tensor) in self._made or id(tensor) in self._drawn

    def _is_known(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._made

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        known = {
            id(leaf): self._made[id(leaf)][1]
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        worked_out: list[Tensor] = []

        def value_of(value: Any) -> Any:
            if isinstance(value, Tensor):
                return known[id(value)]()
            # The forward names its own device; the value is worked out on the CPU.
            on_other = isinstance(value, torch.device) or value in ("meta", "cuda")
            return torch.device("cpu") if on_other else value

        def call() -> Tensor:
            if not worked_out:
                if func is torch.Tensor.to:
                    worked_out.append(value_of(args[0]).to(dtype))
                else:
                    worked_out.append(func(*tree_map(value_of, args), **tree_map(value_of, kwargs)))
            return worked_out[0]

        return call

    def value_of(self, tensor: Tensor) -> Any:
        """Return the number that a tensor of a single entry holds; None where it is not known."""
        if not self._is_known(tensor) or tensor.numel() != 1:
            return None
        with _disable_current_modes():
            return self._made[id(tensor)][1]().item()


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    is_own = name.startswith("__") and name.endswith("__")
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return "out" in kwargs or (
        in_place or name in ("__setitem__", "__set__") if is_own else name.endswith("_")
    )
