"""Runs ops of a program on tensors, one after the other, as torch has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from planner.language.graph import Op, map_refs
from planner.runtime.stage.program_fx import aten_overload


def executed(ops: Iterable[Op], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors by name: those that were given, and those that the ops make."""
    values: dict[str, Any] = dict(given)
    for op in ops:
        args = map_refs(op.args, lambda ref, values=values: values[ref.name])
        made = aten_overload(op.target)(*args, **dict(op.kwargs))
        values |= zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=True)
    return values
