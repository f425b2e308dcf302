"""Whether a forward does on many samples what it does on the few that it is captured on.

A graph is the line through two small batches. What Python computes of the number of samples
(``max(len(x), 4)``, ``x[: min(len(x), 8)]``, ``if len(x) > 16``) may be on that line there and on
none for larger batches. So the functions that a forward calls on meta tensors are noted for a small
and for a large batch: the same ones must be called, with numbers and sizes on a line with whole
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from planner.capture.align import BATCH_SIZES, UnlikeExports
from planner.capture.diagnose import calling_line

MANY = 1009
"""Samples of the large batch: more than what a forward compares their number with, and a prime."""

Shapes = Sequence[tuple[torch.Size, torch.Size, torch.dtype]]
"""Of each tensor of the batch: its shape for each of `BATCH_SIZES`, its dtype."""

Noted = tuple[Any, tuple[int | float | bool, ...]]
"""A function, with the numbers among its arguments and the sizes of what it returns."""


class _Calls(TorchFunctionMode):
    """Notes what functions of torch are called with. Mutable: it grows call by call.

    At the call of number `stop` the forward ends with `_Stopped`, which has the user's line.
    """

    def __init__(self, stop: int = -1) -> None:
        super().__init__()
        self.noted: list[Noted] = []
        self._stop = stop

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if shapes:
            if len(self.noted) == self._stop:
                raise _Stopped(calling_line())
            numbers = (*_numbers((args, kwargs)), *(size for shape in shapes for size in shape))
            # (What a module that runs as it is was tried with is among the arguments of its op.)
            self.noted.append((func, () if _is_ours(func) else numbers))
        return result


def _is_ours(func: Any) -> bool:
    return str(getattr(func, "__module__", "")) == "torch._ops.planner"


class _Stopped(Exception):
    """A forward is at the call that was looked for."""


def refuse_other_sizes(shapes: Shapes, run: Callable[[Sequence[torch.Tensor]], Any]) -> None:
    """Raise UnlikeExports, with the line, where a forward does other things on a large batch.

    `run` runs a new copy of the module on meta tensors. A forward that meta tensors can't go
    through is not looked at.
    """
    few, many = (_batch(shapes, size) for size in (BATCH_SIZES[0], MANY))
    calls = []
    for tensors in (few, many):
        found = _Calls()
        try:
            with found:
                run(tensors)
        except Exception:
            return
        calls.append(found.noted)
    at = _first_other(*calls)
    if at is None:
        return
    line = ""
    try:
        with _Calls(stop=at):
            run(many)
    except _Stopped as stopped:
        line = str(stopped)
    name = resolve_name(calls[1][min(at, len(calls[1]) - 1)][0]) or "forward"
    raise UnlikeExports(
        f"on a batch of {MANY} samples the forward does otherwise than on {BATCH_SIZES[0]}, in "
        f"{name}{line}: what Python computes of the number of samples (a minimum, a branch, a "
        "whole quotient) must hold for every number; use the size itself, or tensors",
        place=f"{name}{line}",
    )


def _batch(shapes: Shapes, size: int) -> list[torch.Tensor]:
    small, large = BATCH_SIZES
    return [
        torch.empty(
            [a + (b - a) // (large - small) * (size - small) for a, b in zip(*each, strict=True)],
            dtype=dtype,
            device="meta",
        )
        for *each, dtype in shapes
    ]


def shapes_of(small: Mapping[str, torch.Tensor], large: Mapping[str, torch.Tensor]) -> Shapes:
    """Return the shapes of the tensors of two example batches."""
    return [(small[path].shape, large[path].shape, small[path].dtype) for path in small]


def _first_other(few: Sequence[Noted], many: Sequence[Noted]) -> int | None:
    """Return the number of the first call that another size makes another; None: there is none."""
    for at, ((func, small), (other, large)) in enumerate(zip(few, many, strict=False)):
        if func != other or len(small) != len(large):
            return at
        if not all(map(_is_on_line, small, large)):
            return at
    return None if len(few) == len(many) else min(len(few), len(many))


def _is_on_line(small: float, large: float) -> bool:
    """Whether two numbers are equal, or whole steps of the number of samples apart."""
    if small == large or (small != small and large != large):  # (nan)
        return True
    whole = float(small).is_integer() and float(large).is_integer()
    steps = MANY - BATCH_SIZES[0]
    return whole and not isinstance(small, bool) and int(large - small) % steps == 0


def _numbers(value: Any) -> Iterator[int | float | bool]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, int | float):
            yield leaf
        elif isinstance(leaf, slice):
            # (None is no number; a slice with other Nones has other numbers.)
            yield from _numbers((leaf.start, leaf.stop, leaf.step))
