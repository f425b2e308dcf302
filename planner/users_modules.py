"""A user's own modules that are called like ours: their model file loads theirs.

planner installs the names below beside its own. A model file that says ``import search`` means the
module beside it, while a command has ours loaded under that name. So while a user's code runs, the
name stands for theirs, and for ours again when it ends:

    before          sys.modules["search"] is ours
    inside          sys.modules["search"] is the user's, found in the model file's folder
    after           sys.modules["search"] is ours again; theirs is kept for the next time

A process that has nothing of ours under these names, as a rank, leaves theirs in place. What loads
a user's code (`planner.language.graph`, `planner.capture`, `planner.runtime`) imports none of these
names, so nothing of ours can meet the wrong one inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.files import ROOT

OUR_NAMES = ("cli", "commands", "costmodel", "profiles", "search")
"""Top-level modules that come with planner, but for `planner` itself."""

_kept: dict[Path, dict[str, ModuleType]] = {}
"""Modules of users by the folder of their model file, as they were when their code ended."""


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds some names in one folder, before everything that is installed."""

    folder: Path
    names: tuple[str, ...]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a name is, if it is one of these; parts of packages are found as usual."""
        if path is not None or name not in self.names:
            return None
        return PathFinder.find_spec(name, [str(self.folder)])


def put_ours_first() -> None:
    """Let our names stand for ours in this process, whatever is on its path."""
    sys.meta_path.insert(0, _Finder(ROOT, OUR_NAMES))


def names_of(folder: Path) -> tuple[str, ...]:
    """Return which of our names a folder has modules or packages of."""
    if folder == ROOT:
        return ()
    return tuple(
        name
        for name in OUR_NAMES
        if (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py"))
    )


@contextmanager
def users_modules(folder: Path) -> Iterator[None]:
    """Let our names stand for a user's modules where their folder has some."""
    names = names_of(folder)
    finder = _Finder(folder, names)
    if not names or finder in sys.meta_path:
        yield
        return
    has_ours = any(map(_is_ours, OUR_NAMES))
    ours = _take(names) if has_ours else {}
    sys.modules.update(_kept.get(folder, {}))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if has_ours:
            sys.meta_path.remove(finder)
            _kept[folder] = _take(names)
            sys.modules.update(ours)


def kept_modules() -> list[ModuleType]:
    """Return modules of users that are not in `sys.modules` now."""
    return [module for kept in _kept.values() for module in kept.values()]


def among_users_modules(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function as one that runs among the modules of its folder."""
    if not names_of(folder):
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with users_modules(folder):
            return function(*args, **kwargs)

    return run


def _is_ours(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and ROOT in Path(file).resolve().parents


def _take(names: Sequence[str]) -> dict[str, ModuleType]:
    """Take the modules of these names, and all their parts, out of `sys.modules`."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}
