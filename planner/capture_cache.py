"""Captured graphs kept on disk, so that a second search of a model needs no torch at all.

An entry names every local file the model's meaning depends on (the model file, modules it
imports, files it reads while loading) with their digests, and the versions of the
libraries that took part. Any difference means a fresh capture. What a model file takes
from the environment is not seen: pass ``use_cache=False`` for such a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from planner.errors import ModelError
from planner.graph import ModelGraph, from_json, to_json
from planner.plan import Precision

_FORMAT = 1
_LIBRARIES = ("torch", "transformers", "numpy")


def cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/planner`` (``~/.cache/planner`` without it)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "planner"


def load_graph(
    path: str | os.PathLike[str], *, precision: Precision = "model", use_cache: bool = True
) -> ModelGraph:
    """Return the graph of a model file, captured now or kept from an equal earlier capture.

    Raises ModelError or CaptureError as `planner.capture` does. A cache that can't be read
    or written is only slower, never an error.
    """
    file = Path(path)
    if not file.is_file():
        kind = "is a directory" if file.is_dir() else "does not exist"
        raise ModelError(f"model file {path} {kind}; give a .py file that defines model()")
    key = _digest(f"{file.resolve()} {precision}".encode())
    entry = cache_dir() / "captures" / f"{key[:32]}.json"
    if use_cache and (graph := _read(entry)) is not None:
        return graph
    from planner.capture import capture_source, load_model_file  # imports torch

    source = load_model_file(path)
    graph = capture_source(source, precision=precision)
    if use_cache:
        _write(entry, graph, source.dependencies)
    return graph


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "graph": _own_digest()}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _own_digest() -> str:
    """Digest of the modules that decide what a capture looks like."""
    here = Path(__file__).parent
    files = [here / name for name in ("graph.py", "blocks.py", "batch.py", "model_file.py")]
    files += sorted((here / "capture").glob("*.py"))
    return _digest(b"".join(file.read_bytes() for file in files))[:16]


def _read(entry: Path) -> ModelGraph | None:
    try:
        data: dict[str, Any] = json.loads(entry.read_text())
        if data["format"] != _FORMAT or data["versions"] != _versions():
            return None
        for name, digest in data["dependencies"]:
            if _digest(Path(name).read_bytes()) != digest:
                return None
        graph = from_json(data["graph"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return graph if isinstance(graph, ModelGraph) else None


def _write(entry: Path, graph: ModelGraph, dependencies: tuple[Path, ...]) -> None:
    data = {
        "format": _FORMAT,
        "versions": _versions(),
        "dependencies": [[str(p), _digest(p.read_bytes())] for p in dependencies],
        "graph": to_json(graph),
    }
    scratch = entry.with_suffix(f".{os.getpid()}.tmp")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(data, separators=(",", ":")))
        os.replace(scratch, entry)
    except OSError:
        with suppress(OSError):  # nor is there a folder, maybe
            scratch.unlink()
