"""Errors of the user's own code, told as theirs: one line with the place, and no traceback."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planner.capture.diagnose import causes, first_line
from planner.errors import ModelError, PlannerError
from planner.files import PACKAGE, is_local

_OWN = str(PACKAGE)
_TORCH = str(Path(torch.__file__).parent)
_MODES = ("__torch_function__", "__torch_dispatch__")
"""Functions of ours that the user's calls of torch pass through."""


@contextmanager
def told_as_users(file: str, doing: str) -> Iterator[None]:
    """Raise ModelError for what the user's code raises inside; errors of other code pass.

    `doing` says what the code was called for, such as ``training in fp64``.
    """
    try:
        yield
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        line = users_line(error)
        if line is None:
            raise
        raise ModelError(f"{file}: {doing} fails{line}: {first_line(error)}") from error


def is_torchs(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of torch."""
    return frame.filename.startswith(_TORCH)


def users_line(error: BaseException) -> str | None:
    """Return `` at file:line: `code``` where an error rose in the user's code, or in a library that
    it called; None where it rose in ours.
    """
    first = list(causes(error))[-1]
    for frame in reversed(traceback.extract_tb(first.__traceback__)):
        if frame.filename.startswith(_OWN) and frame.name not in _MODES:
            return None
        if not frame.filename.startswith("<") and is_local(frame.filename):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f" at {frame.filename}:{frame.lineno}: `{code}`"
    return None
