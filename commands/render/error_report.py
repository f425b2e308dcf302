"""What a report of a mistake of ours needs, in a file: the command line, versions, traceback."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from planner.cache_folder import cache_dir

_LIBRARIES = ("planner", "torch", "transformers", "numpy", "ortools", "pydantic", "typer", "rich")


def write_report(error: BaseException, arguments: Sequence[str], stage: str) -> Path:
    """Write what is known of an error; return the file.

    It is in `errors/` of the cache folder, or in the folder for temporary files where that can't
    be written to. Raises OSError where neither can.
    """
    text = "\n".join(
        (
            f"planner {shlex.join(arguments)}",
            f"in {Path.cwd()}, while {stage}",
            f"Python {sys.version}, {platform.platform()}",
            ", ".join(_versions()),
            "",
            "".join(traceback.format_exception(error)),
        )
    )
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    folder = cache_dir() / "errors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name
        _write(file, text)
    except OSError:
        file = Path(tempfile.gettempdir()) / f"planner-error-{name}"
        _write(file, text)
    return file


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", errors="backslashreplace")  # paths need not be UTF-8


def _versions() -> list[str]:
    found = []
    for library in _LIBRARIES:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return found
