"""Calling a user's autograd function by the key that a graph names it by."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlanError
from planner.language.graph.function_keys import function_key


def autograd_function(key: str, *args: Any) -> Any:
    """Apply the function to its arguments; return its tensor, or its tensors where it has more.

    Raises PlanError when this process has not imported the function.
    """
    result = find_function(key).apply(*args)
    results = result if isinstance(result, tuple) else (result,)
    tensors = tuple(value for value in results if isinstance(value, Tensor))
    return tensors[0] if len(tensors) == 1 else tensors


@cache
def find_function(key: str) -> type[torch.autograd.Function]:
    """Return the imported function of a key: the newest, where a file was loaded twice."""
    found = [
        function
        for function in _subclasses(torch.autograd.Function)
        if function.__qualname__ == key.rpartition("@")[0] and function_key(function) == key
    ]
    if not found:
        raise PlanError(
            f"the model calls the autograd function {key}, which no imported module defines; "
            "build the model from the file that the plan was made for, or search again"
        )
    return found[-1]


def _subclasses(function: type[Any]) -> Iterator[type[Any]]:
    for derived in function.__subclasses__():
        yield derived
        yield from _subclasses(derived)
