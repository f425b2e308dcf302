"""Model files that the page may name: under the working folder, ending in .py."""

from __future__ import annotations

import os
import re
from pathlib import Path

from planner.errors import PlannerError

MOST_FILES = 200
"""Files that are listed."""
DEEPEST = 3
"""Folders below the working folder that are looked into."""
LARGEST = 1_000_000
"""Bytes of a file that is listed."""

_DEFINES = tuple(re.compile(rf"^def {name}\(", re.M) for name in ("model", "batch"))


def model_files(folder: Path) -> list[str]:
    """Return files that define model() and batch(), relative to the folder; none is executed."""
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(
            name
            for name in folders
            if depth < DEEPEST and not name.startswith((".", "_")) and name != "site-packages"
        )
        for name in sorted(names):
            given = str((Path(place) / name).relative_to(folder))
            try:
                file = find_model(folder, given)
                text = file.read_text() if file.stat().st_size < LARGEST else ""
            except (PlannerError, OSError, UnicodeDecodeError):
                continue
            if all(pattern.search(text) for pattern in _DEFINES):
                found.append(given)
            if len(found) == MOST_FILES:
                return found
    return found


def find_model(folder: Path, given: str) -> Path:
    """Return the file that a request names, links followed.

    Raises PlannerError for what is no .py file inside the folder.
    """
    trouble = f"model file {given!r} was given; name a .py file inside the working folder"
    try:
        file, root = (folder / given).resolve(), folder.resolve()
        is_inside = file.is_relative_to(root) and not Path(given).is_absolute()
        if is_inside and file.suffix == Path(given).suffix == ".py" and file.is_file():
            return file
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise PlannerError(trouble)
