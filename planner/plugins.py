"""Code of others that adds to planner: schedules, op families, backends of devices.

A plugin is a module that registers what it adds when it is imported (`register_schedule`). It is
found in two ways:

    a package    names it in its metadata, as an entry point of the group ``planner.plugins``
    a file       is named on the command line, or in PLANNER_PLUGINS (with ``:`` between)

Commands, ranks and `planner.apply` load them; a script that calls `search` imports its own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from planner.errors import PlannerError

GROUP = "planner.plugins"
"""The group of entry points that packages name plugins in."""

PLUGIN_FILES = "PLANNER_PLUGINS"
"""Names the files of plugins; ranks inherit it from the command that starts them."""

_loaded: dict[str, ModuleType] = {}
"""By file, or by what an entry point says."""


def name_files(files: Iterable[Path]) -> None:
    """Add files to PLANNER_PLUGINS, for this process and those it starts.

    Raises PlannerError for a file that is not there.
    """
    named = [name for name in os.environ.get(PLUGIN_FILES, "").split(os.pathsep) if name]
    for file in files:
        if not file.is_file():
            raise PlannerError(f"no plugin {file}; give a Python file that registers what it adds")
        named.append(str(file.resolve()))
    if named:
        os.environ[PLUGIN_FILES] = os.pathsep.join(dict.fromkeys(named))


def load_plugins() -> None:
    """Import every plugin, each once in a process.

    Raises PlannerError, with the plugin's file and line, when one can't be imported.
    """
    from importlib.metadata import entry_points  # takes a tenth of `planner --help`

    for point in entry_points(group=GROUP):
        if point.value not in _loaded:
            with _Telling(f"plugin {point.value}"):
                _loaded[point.value] = importlib.import_module(point.module)
    for file in os.environ.get(PLUGIN_FILES, "").split(os.pathsep):
        if file and file not in _loaded:
            with _Telling(f"plugin {file}"):
                _loaded[file] = _import_file(file)


def plugin_digests() -> tuple[str, ...]:
    """Return a digest of each loaded plugin's source: answers that they change differ by it."""
    files = [getattr(module, "__file__", None) for module in _loaded.values()]
    return tuple(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file)


def _import_file(file: str) -> ModuleType:
    # Its own name would hide a module of the user's that is called alike.
    name = f"planner_plugin_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlannerError(f"plugin {file} is not a Python file; name one that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Telling:
    """Turns what a plugin raises into one line with its place."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, PlannerError):
            raise PlannerError(f"{self._what} was not loaded: {error}") from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PlannerError(
            f"{self._what} can't be imported: {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno}); mend it, or leave it away"
        ) from error
