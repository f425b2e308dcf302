"""Loading a user's ``model.py``: model(), batch(size) and perhaps loss(output, batch)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from planner.errors import ModelError
from planner.files import ROOT, is_local, real_path
from planner.users_modules import among_users_modules, kept_modules, users_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a model file defines, and the local files that were read to load it."""

    path: Path
    build: Callable[[], Any]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Any] | None
    dependencies: tuple[Path, ...]
    loss_weight: Callable[[Any], float] | Literal["sum"] | None = None

    @property
    def name(self) -> str:
        """The file's stem."""
        return self.path.stem

    def with_arguments(self, arguments: Mapping[str, Any]) -> ModelSource:
        """Return the source whose model is built by ``model(**arguments)``.

        Raises ModelError, in one line, where model() does not take them.
        """
        if not arguments:
            return self
        try:
            inspect.signature(self.build).bind(**arguments)
        except TypeError as error:
            taken = ", ".join(inspect.signature(self.build).parameters) or "none"
            given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            raise ModelError(
                f"model() of {self.path.name} was given {given}: {error}; the arguments it takes: "
                f"{taken}"
            ) from None
        return replace(self, build=functools.partial(self.build, **arguments))


def existing_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a model file. Raises ModelError where no file is there."""
    file = Path(path)
    if file.is_dir():
        raise ModelError(f"model file {path} is a directory; give a .py file that defines model()")
    if not file.is_file():
        raise ModelError(f"model file {path} does not exist; give a .py file that defines model()")
    return file


def load_model_file(path: str | os.PathLike[str]) -> ModelSource:
    """Execute a model file and return what it defines.

    Raises ModelError, in one line, when the file is missing, fails while it is executed,
    or lacks model() or batch().
    """
    file = existing_file(path).resolve()
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"planner_user_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is not a Python file; give a .py file that defines model()")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with _import_from(file.parent), users_modules(file.parent), recorded_reads() as reads:
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path} failed to load: {_where(error, file)}{_brief(error)}") from error
    for name, use in (("model", "returns an nn.Module"), ("batch", "takes a number of samples")):
        if not callable(getattr(module, name, None)):
            raise ModelError(f"{path} defines no {name}(); add a function {name} that {use}")
    loss, weight = (getattr(module, name, None) for name in ("loss", "loss_weight"))
    if not (weight is None or weight == "sum" or callable(weight)):
        raise ModelError(
            f"loss_weight of {path} is a {type(weight).__name__}; define a function of a part of "
            'the batch, as planner.apply(..., loss_weight=) takes it, or "sum"'
        )
    return ModelSource(
        path=file,
        build=among_users_modules(file.parent, module.model),
        batch=among_users_modules(file.parent, module.batch),
        loss=None if loss is None else among_users_modules(file.parent, loss),
        loss_weight=among_users_modules(file.parent, weight) if callable(weight) else weight,
        dependencies=tuple(sorted({file} | reads.files | local_modules())),
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


@dataclass(slots=True)
class Reads:
    """What was read while a model file was loaded and its model built; mutable, as it grows.

    `files` are local ones (neither installed nor part of Python); those that were not there, and
    names of `variables` of the environment, count where local code looked for them.
    `is_relative`: a file was named relative to the working directory.
    """

    files: set[Path] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    is_relative: bool = False


_recorders: list[Reads] = []
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _recorders or event != "open" or not isinstance(args[0], str):
        return
    if args[2] & (os.O_WRONLY | os.O_CREAT) or not is_local(args[0]):
        return
    if os.path.isfile(args[0]) or _is_asked_by_local_code():
        for reads in _recorders:
            reads.files.add(Path(args[0]).resolve())
            reads.is_relative |= not os.path.isabs(args[0])


_Environment: Any = type(os.environ)
_get_variable = _Environment.__getitem__


def _recorded_variable(environment: Any, name: str) -> str:
    """As ``os.environ[name]``, by which every other way to read a variable goes."""
    if _is_asked_by_local_code():
        for reads in _recorders:
            reads.variables.add(name)
    return _get_variable(environment, name)


def _is_asked_by_local_code() -> bool:
    """Whether the innermost code outside Python's own library is neither installed nor ours."""
    frame = sys._getframe(2)
    while frame is not None and _is_of_python(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and is_local(frame.f_code.co_filename)


@functools.cache
def _is_of_python(code_file: str) -> bool:
    packages = (*site.getsitepackages(), sysconfig.get_paths()["purelib"])
    return code_file.startswith("<") or (
        code_file.startswith(sysconfig.get_paths()["stdlib"] + os.sep)
        and not code_file.startswith(tuple(packages))
    )


@contextlib.contextmanager
def recorded_reads() -> Iterator[Reads]:
    """Collect what is read inside, so that a cached capture notices what has changed.

    What compiled code reads is not seen: variables, and files such as weights in safetensors.
    """
    global _hooked  # audit hooks can't be removed: one is added, once
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    reads = Reads()
    _recorders.append(reads)
    _Environment.__getitem__ = _recorded_variable
    try:
        yield reads
    finally:
        _recorders.pop()
        if not _recorders:
            _Environment.__getitem__ = _get_variable


_ROOMS = ("planner", "profiles", "costmodel", "search", "commands")
_OWN = tuple(f"{ROOT}{os.sep}{name}" for name in (*(room + os.sep for room in _ROOMS), "cli.py"))


def local_modules() -> set[Path]:
    """Source files of imported modules that are neither installed nor part of Python."""
    modules = [*sys.modules.values(), *kept_modules()]
    files = {getattr(module, "__file__", None) for module in modules}
    return {file for f in files if f and (file := _users_module(f)) is not None}


@functools.cache  # torch brings thousands of modules, each with a walk of its path's links
def _users_module(name: str) -> Path | None:
    """The file of a module, unless it is installed, part of Python or ours."""
    path = real_path(name)
    return Path(path) if is_local(path) and not path.startswith(_OWN) else None
