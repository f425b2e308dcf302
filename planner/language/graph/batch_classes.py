"""Names of the classes that batches are made with, so that each rank finds its own.

A class of an installed module is called ``module:Class``. One of the user's own files, whose
modules have other names in other processes (the model file's, the script's), is called
``file.py:Class`` and found in whichever module was made of a file of that name.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import PurePath
from types import ModuleType
from typing import Any

from planner.files import is_local

_seen: dict[str, type] = {}
"""Classes of batches that this process was given: not each can be imported by its name."""


def name_of(kind: type) -> str:
    """Return what a class is called in the structure of a batch."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    place = PurePath(file).name if file and is_local(file) else kind.__module__
    name = f"{place}:{kind.__qualname__}"
    _seen[name] = kind
    return name


def class_called(name: str) -> type | None:
    """Return the class of a name; None where this process has none."""
    return _seen.get(name) or importable(name)


def importable(name: str) -> type | None:
    """Return the class that another process finds by the name."""
    place, _, qualname = name.partition(":")
    for module in _modules(place):
        found: Any = module
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
    return None


def _modules(place: str) -> list[ModuleType]:
    if not place.endswith(".py"):
        return _imported(place)
    made = [m for m in list(sys.modules.values()) if _file_name(m) == place]
    return made or _imported(place.removesuffix(".py"))


def _imported(name: str) -> list[ModuleType]:
    try:
        return [importlib.import_module(name)]
    except Exception:  # a module may raise anything while it is loaded
        return []


def _file_name(module: Any) -> str:
    file = getattr(module, "__file__", None)
    return PurePath(file).name if isinstance(file, str) else ""
