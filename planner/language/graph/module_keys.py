"""Names of modules that are called as they are, which hold in every process: ``Experts@1f0c9a2b``.

A graph names such a module by its class, and by a digest of the code and of all attributes of it
and its parts: modules of one key compute the same from the same tensors. Tensors count by their
names and shapes, because the op that calls the module is given them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

from planner.language.graph.function_keys import source_of

OPAQUE_MODULE = "planner.opaque_module.default"
"""The target of an op that calls one; its first argument is the key."""

_OF_EVERY_MODULE = ("_parameters", "_buffers", "_modules", "training", "forward")
_OF_VALUES = ("_is_hf_initialized",)
"""What a library notes of a part whose parameters have values; no forward reads it."""
CACHED_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""Where torch's recurrent layers have their parameters a second time, and make it anew themselves
where a parameter is another one (`nn.RNNBase`).
"""
_DEPTH = 6
"""So far into nested objects attributes are told."""


def module_key(module: Any) -> str:
    """Return the key of a `torch.nn.Module`, with or without values."""
    told: list[Any] = []
    numbers: dict[int, int] = {}  # tied tensors have one
    for name, part in module.named_modules():
        told.append((name, _code(type(part)), part.training))
        told += [
            (name, key, tuple(t.shape), numbers.setdefault(id(t), len(numbers)))
            for key, t in _own_tensors(part)
        ]
        told += [(name, key, _told(value, _DEPTH)) for key, value in attributes(part)]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:8]
    return f"{name_of(module)}@{digest}"


def name_of(module: Any) -> str:
    """Return what a user calls a module: its class, or the function that it stands for."""
    return str(vars(module).get("called_as", type(module).__qualname__))


def class_of(key: str) -> str:
    """Return the qualified name of a key's class."""
    return key.rpartition("@")[0]


def attributes(module: Any) -> list[tuple[str, Any]]:
    """Return what a module holds beside tensors and parts, and without what a forward cached."""
    return [
        # Hooks are kept by numbers that count on through the whole process. (What a capture notes
        # by hooks of its own is none of the module's, and grows with each op.)
        (name, list(filter(_is_users, value.values())) if "_hooks" in name else value)
        for name, value in vars(module).items()
        if name not in (*_OF_EVERY_MODULE, *_OF_VALUES, *CACHED_WEIGHTS)
        and not isinstance(getattr(type(module), name, None), cached_property)
    ]


def _is_users(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] != "planner"


def _own_tensors(module: Any) -> list[tuple[str, Any]]:
    held = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in held if tensor is not None]


def _code(kind: type) -> list[str]:
    """Digests of the code of a class and of those it derives from, but for PyTorch's."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch"]
    return [
        hashlib.sha256(source_of(base, tuple(_methods(base)))).hexdigest()
        for base in bases
        if base is not object
    ] or [kind.__qualname__]


def _methods(kind: type) -> list[Any]:
    return [value for value in vars(kind).values() if isinstance(value, FunctionType)]


def _told(value: Any, depth: int) -> Any:
    """Return what two processes can compare of an attribute: text, no addresses."""
    kind = type(value)
    if isinstance(value, partial):
        return ("partial", _told((value.func, value.args, value.keywords), depth - 1))
    if isinstance(value, MethodType):
        return (kind.__qualname__, _told(value.__func__, depth - 1))
    if isinstance(value, FunctionType):
        code = hashlib.sha256(source_of(value, (value,))).hexdigest()
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return (value.__qualname__, code, _told(cells, depth - 1) if depth else None)
    if isinstance(value, type):
        return value.__qualname__
    if not depth or isinstance(value, bool | int | float | str | bytes | type(None)):
        return repr(value) if depth else kind.__qualname__
    if isinstance(value, set | frozenset):
        return (kind.__name__, sorted((_told(item, depth - 1) for item in value), key=repr))
    if isinstance(value, Mapping):
        return (kind.__name__, [_told(item, depth - 1) for item in value.items()])
    if isinstance(value, list | tuple):
        return (kind.__name__, [_told(item, depth - 1) for item in value])
    if hasattr(value, "tobytes"):  # an array of numbers, which prints in part
        return (kind.__qualname__, hashlib.sha256(value.tobytes()).hexdigest())
    held = getattr(value, "__dict__", None)
    if held:
        names = sorted(name for name in held if not name.startswith("__"))
        return (kind.__qualname__, [(name, _told(held[name], depth - 1)) for name in names])
    return (kind.__qualname__, re.sub(r"0x[0-9a-f]+", "", repr(value)))
