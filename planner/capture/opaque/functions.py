"""Functions of the user's that are called as they are, as modules without tensors of their own.

A model's own forward, or a loss, may call a function that no graph can hold (the CTC loss of
transformers picks the labels that are no padding). It is an op of the same kind as a module is:
`CalledFunction` has it for its forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from planner.language.graph.module_keys import class_of, module_key


class CalledFunction(nn.Module):
    """A function as a module. Messages and keys have the function's name."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function
        self.called_as = function.__qualname__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function does."""
        return self.function(*args, **kwargs)


def function_of(code: CodeType, names: dict[str, Any]) -> FunctionType | None:
    """Return the function of a file that has some code, by the file's names; None where it is a
    method, reads variables of a function around it, or waits in the middle.
    """
    if code.co_freevars or code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return None
    return next((each for each in _wrapped(names.get(code.co_name)) if each.__code__ is code), None)


def find_function(key: str) -> CalledFunction | None:
    """Return the function of a key, of any file that is imported."""
    name = class_of(key)
    for module in list(sys.modules.values()):
        for function in _wrapped(getattr(module, "__dict__", {}).get(name)):
            called = CalledFunction(function)
            if module_key(called) == key:
                return called
    return None


def _wrapped(value: Any) -> Iterator[FunctionType]:
    """Yield a function, and those that decorators put it around."""
    seen: set[int] = set()
    while isinstance(value, FunctionType) and id(value) not in seen:
        seen.add(id(value))
        yield value
        value = getattr(value, "__wrapped__", None)
