"""Loading a user's ``model.py``: model(), batch(size) and perhaps loss(output, batch)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a model file defines, and the local files its meaning depends on."""

    path: Path
    build: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None
    dependencies: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The file's stem."""
        return self.path.stem


def load_model_file(path: str | os.PathLike[str]) -> ModelSource:
    """Execute a model file and return what it defines.

    Raises ModelError, in one line, when the file is missing, fails while it is executed,
    or lacks model() or batch().
    """
    file = Path(path)
    if not file.is_file():
        kind = "is a directory" if file.is_dir() else "does not exist"
        raise ModelError(f"model file {path} {kind}; give a .py file that defines model()")
    file = file.resolve()
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"planner_user_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is not a Python file; give a .py file that defines model()")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    opened: set[Path] = set()
    try:
        with _import_from(file.parent), _record_opened(opened):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path} failed to load: {_where(error, file)}{_brief(error)}") from error
    for name, use in (("model", "returns an nn.Module"), ("batch", "takes a number of samples")):
        if not callable(getattr(module, name, None)):
            raise ModelError(f"{path} defines no {name}(); add a function {name} that {use}")
    return ModelSource(
        path=file,
        build=module.model,
        batch=module.batch,
        loss=getattr(module, "loss", None),
        dependencies=tuple(sorted({file} | opened | _local_modules())),
    )


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _where(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: "
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"line {lines[-1]}: " if lines else ""


@contextlib.contextmanager
def _import_from(folder: Path) -> Iterator[None]:
    """Let the model file import its neighbours, after everything installed."""
    entry = str(folder)
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    # The entry stays: functions of the file may import lazily when they are called.
    yield


_recorders: list[set[Path]] = []
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _recorders and event == "open" and isinstance(args[0], str):
        mode = args[1]
        if (mode is None or "r" in mode) and _is_local(args[0]):
            _recorders[-1].add(Path(args[0]).resolve())


@contextlib.contextmanager
def _record_opened(into: set[Path]) -> Iterator[None]:
    """Collect local files read inside, so that a cached capture notices a changed config."""
    global _hooked  # audit hooks can't be removed: one is added, once
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _recorders.append(into)
    try:
        yield
    finally:
        _recorders.remove(into)


_INSTALLED = tuple(
    str(Path(p).resolve()) + os.sep
    for p in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        str(Path(__file__).parent),
    }
)


def _is_local(name: str) -> bool:
    path = str(Path(name).resolve()) if name else ""
    return (
        bool(path)
        and not path.startswith((*_INSTALLED, "/proc/", "/sys/", "/dev/"))
        and not path.endswith((".pyc", ".so"))
        and os.path.isfile(path)
    )


def _local_modules() -> set[Path]:
    """Source files of imported modules that are neither installed nor part of Python."""
    files = (getattr(m, "__file__", None) for m in list(sys.modules.values()))
    own = Path(__file__).resolve().parent.parent
    names = ("planner", "profiles", "costmodel", "search", "cli")
    rooms = tuple(str(own / name) + os.sep for name in names)
    return {
        Path(f).resolve()
        for f in files
        if f and _is_local(f) and not str(Path(f).resolve()).startswith(rooms)
    }
