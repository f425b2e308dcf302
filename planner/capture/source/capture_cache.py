"""Captured graphs kept on disk, so that a second search of a model needs no torch at all.

An entry names every local file the model's meaning depends on (the model file, modules it
imports, files it reads while it is loaded, built and captured, those it looked for in vain) with
their digests, the environment variables that such code read meanwhile, and the versions of all
libraries that were loaded. Any difference means a fresh capture. What compiled code reads, the
variables that libraries read, the names in a folder, the clock and the network are not seen: pass
``use_cache=False`` for a model file that depends on them. Where ops of the graph have rules of the
user's (`planner.register_rule`), an entry names them, and the model file is executed if they are
not there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from planner.cache_folder import cache_dir, write_entry
from planner.capture.source.model_file import (
    existing_file,
    load_model_file,
    local_modules,
    recorded_reads,
)
from planner.files import PACKAGE
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.ops.users import has_user_rule
from planner.language.plan import Precision
from planner.units import MIB

_FORMAT = 4
_ALWAYS_READ = ("CUDA_VISIBLE_DEVICES",)  # by CUDA itself, which is not seen
_MAX_DIGESTED_BYTES = 64 * MIB


def load_graph(
    path: str | os.PathLike[str],
    *,
    precision: Precision = "model",
    length: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_cache: bool = True,
) -> ModelGraph:
    """Return the graph of a model file, captured now or kept from an equal earlier capture.

    With a `length` its batches are ``batch(size, length)``, with `arguments` (plain values) its
    model is ``model(**arguments)``. Raises ModelError or CaptureError as `planner.capture` does. A
    cache that can't be read or written is only slower, never an error.
    """
    file = existing_file(path)
    told = f"{file.resolve()} {precision}{f' {length}' if length else ''}"
    if arguments:
        told += f" {sorted(arguments.items())!r}"
    key = _digest(os.fsencode(told))  # names of files need not be UTF-8
    entry = cache_dir() / "captures" / f"{key[:32]}.json"
    if use_cache and (kept := _read(entry)) is not None:
        graph, ruled = kept
        if not all(map(has_user_rule, ruled)):
            load_model_file(path)
        return graph
    from planner.capture import capture_source  # imports torch

    with recorded_reads() as reads:
        source = load_model_file(path).with_arguments(arguments or {})
        graph = capture_source(source, precision=precision, length=length)
    if use_cache:
        files = {*source.dependencies, *reads.files, *local_modules()}
        folder = os.getcwd() if reads.is_relative else None
        _write(entry, graph, files, {*_ALWAYS_READ, *reads.variables}, folder)
    return graph


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_digest(file: Path) -> str | None:
    """A digest of what a file holds, of a large one its size and date; None: it is not there."""
    try:
        facts = file.stat()
        if facts.st_size > _MAX_DIGESTED_BYTES:
            return f"{facts.st_size} {facts.st_mtime_ns}"
        return _digest(file.read_bytes())
    except OSError:
        return None


def _variable_digest(name: str) -> str | None:
    """A digest of an environment variable, which may be a secret; None: it is not set."""
    value = os.environ.get(name)
    return None if value is None else _digest(value.encode("utf-8", "surrogateescape"))


def _own_versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], "graph": _own_digest()}


def _loaded_versions() -> dict[str, str]:
    """Versions of the installed libraries that this process has loaded, by their names."""
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    found = _installed()
    return {
        library: metadata.version(library)
        for name in loaded & found.keys()
        for library in found[name]
    }


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    """Libraries by the modules they install: a third of a second, so found once a process."""
    return metadata.packages_distributions()


def _own_digest() -> str:
    """Digest of the modules that decide what a capture looks like."""
    rooms = ("capture", "language/graph", "language/ops", "language/across")
    files = sorted(file for room in rooms for file in (PACKAGE / room).rglob("*.py"))
    return _digest(b"".join(file.read_bytes() for file in files))[:16]


def _read(entry: Path) -> tuple[ModelGraph, tuple[str, ...]] | None:
    """A graph that still holds, and the ops with rules of the user's in it."""
    try:
        data: dict[str, Any] = json.loads(entry.read_text())
        if data["format"] != _FORMAT or data["versions"] != _own_versions():
            return None
        for name, digest in data["variables"].items():
            if _variable_digest(name) != digest:
                return None
        if data["folder"] not in (None, os.getcwd()):
            return None
        for name, digest in data["files"].items():
            if _file_digest(Path(name)) != digest:
                return None
        for library, version in data["libraries"].items():
            if metadata.version(library) != version:
                return None
        graph, ruled = from_json(data["graph"]), tuple(data["ruled"])
    except (OSError, ValueError, KeyError, TypeError, metadata.PackageNotFoundError):
        return None
    return (graph, ruled) if isinstance(graph, ModelGraph) else None


def _write(
    entry: Path,
    graph: ModelGraph,
    files: Iterable[Path],
    variables: Iterable[str],
    folder: str | None,
) -> None:
    """`folder` is the working directory, where it matters."""
    data = {
        "format": _FORMAT,
        "versions": _own_versions(),
        "libraries": _loaded_versions(),
        "variables": {name: _variable_digest(name) for name in variables},
        "folder": folder,
        "files": {str(file): _file_digest(file) for file in files},
        "ruled": sorted(filter(has_user_rule, _targets(graph))),
        "graph": to_json(graph),
    }
    write_entry(entry, json.dumps(data, separators=(",", ":")))


def _targets(graph: ModelGraph) -> set[str]:
    return {op.target for program in (graph.preamble, *graph.classes) for op in program.ops}
