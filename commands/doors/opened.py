"""What readers of files share: what a user says beside a file, what a file says, and its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.doors.said import Said
from planner.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user says of a run beside the file."""

    seq_length: int | None = None
    """Tokens of a sample; None: as the file says."""
    task: str | None = None
    """What a model of a config.json is trained for; None: as its architecture says."""
    gpus: int | None = None
    """Devices; None: as the file says."""


@dataclass(frozen=True, kw_only=True)
class Opened(Said):
    """What a file says: a model, and a run of it."""

    name: str
    """What the model is called: letters, digits, hyphens and dots."""
    code: str
    """A model file's text."""


def refuse_task(path: Path, asked: Asked) -> None:
    """Raise ModelError for a task other than that of a file that describes a decoder."""
    if asked.task not in (None, "causal-lm"):
        raise ModelError(f"--task {asked.task} was given; {path} trains a causal-lm: leave it out")


def refuse_other_length(path: Path, asked: Asked, length: int) -> None:
    """Raise ModelError for another length of samples than a file says."""
    if asked.seq_length not in (None, length):
        raise ModelError(
            f"--seq-length {asked.seq_length} was given; {path} says {length}: change it there, or "
            "leave it out"
        )


def read_text(path: Path) -> str:
    """Return a file's text. Raises ModelError where it can't be read."""
    try:
        return path.read_text("utf-8-sig")  # (some editors write a mark before the text)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read ({error}); give a text file") from None


def parsed(path: Path, loads: Callable[[str], Any], language: str, wanted: str) -> Any:
    """Return what a file holds, by the parser of its language.

    Raises ModelError, in one line, for what is no such text, nests too deeply, or has numbers that
    no machine has.
    """
    text = read_text(path)
    try:
        return loads(text)
    except RecursionError:
        raise ModelError(f"{path} is no {language} (it nests too deeply); give {wanted}") from None
    except ValueError as error:
        raise ModelError(f"{path} is no {language} ({error}); give {wanted}") from None


def name_of(text: str, otherwise: str) -> str:
    """Return a model's name for what a file or a folder is called."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.") or otherwise
