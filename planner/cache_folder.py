"""The folder for what planner keeps between runs, and how a file gets there.

It holds `captures/` (graphs of models), `plans/` (answers of searches), `profiles/` (this machine's
own) and `errors/` (reports). All of it may be deleted at any time.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from planner.files import write_atomically


def cache_dir() -> Path:
    """Return the user's cache folder for planner: ``$XDG_CACHE_HOME/planner`` on Linux."""
    return user_cache_path("planner")


def write_entry(entry: Path, text: str) -> None:
    """Write a file that another process may read or write meanwhile; do nothing where it can't.

    A reader finds the old file or the new one, and of two writers one wins.
    """
    with suppress(OSError):
        write_atomically(entry, text)
