"""Which reader a file goes to, and the model file that its answer is written to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commands.doors.opened import Asked, Opened, read_text
from planner.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    is_for: Callable[[Path], bool]
    """Whether a file is one of its kind, by its name and what it holds."""
    read: Callable[[Path, Asked], Opened]
    """Return what a file says. Raises PlannerError, in one line, where something is missing."""


def _huggingface(path: Path, asked: Asked) -> Opened:
    from commands.doors.huggingface import read

    return read(path / "config.json" if path.is_dir() else path, asked)


def _torchtitan(path: Path, asked: Asked) -> Opened:
    from commands.doors.torchtitan import read

    return read(path, asked)


def _megatron(path: Path, asked: Asked) -> Opened:
    from commands.doors.megatron import read

    return read(path, asked)


READERS = (
    _Reader(
        is_for=lambda path: path.suffix == ".json" or (path / "config.json").is_file(),
        read=_huggingface,
    ),
    _Reader(is_for=lambda path: path.suffix == ".toml", read=_torchtitan),
    _Reader(is_for=lambda path: path.is_file() and _has_flags(path), read=_megatron),
)
"""Tried in this order; a .py file is a model file itself."""


def open_model(path: Path, asked: Asked) -> tuple[Path, Opened | None]:
    """Return the model file of what a user gave, and what else that says of a run.

    A .py file is its own model file, and says nothing else. Raises ModelError for a file that no
    reader takes, and PlannerError where one lacks something, in one line each.
    """
    reader = None
    if path.suffix != ".py":
        reader = next((each for each in READERS if each.is_for(path)), None)
    if reader is not None:
        opened = reader.read(path, asked)
        return _kept(opened), opened
    if path.suffix == ".py" or not path.exists():
        for option, value in (("--seq-length", asked.seq_length), ("--task", asked.task)):
            if value is not None:
                raise ModelError(
                    f"{option} {value} was given with {path}; a model file says that itself, in "
                    f"batch(size): leave {option} out"
                )
        return path, None
    raise ModelError(
        f"{path} is none of the files that a model is read from; give a .py file with model() and "
        "batch(size), a Hugging Face config.json or its folder, a Megatron-LM script or list of "
        "flags, or a torchtitan .toml"
    )


def _has_flags(path: Path) -> bool:
    return "--num-layers" in read_text(path)


def _kept(opened: Opened) -> Path:
    """Write a model file to the cache, by what it holds: equal ones are written once."""
    from planner.cache_folder import cache_dir
    from planner.files import write_atomically

    digest = hashlib.sha256(opened.code.encode()).hexdigest()[:8]
    path = cache_dir() / "models" / digest / f"{opened.name}.py"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, opened.code)
    except OSError as error:
        raise ModelError(
            f"the model file {path} can't be written ({error.strerror}); let XDG_CACHE_HOME name a "
            "folder that can"
        ) from None
    return path
