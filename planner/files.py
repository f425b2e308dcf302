"""Writing files so that a reader finds the old one or the new one, never a part of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a scratch file beside `path` to write to, which replaces it where the body ends well.

    Where the body does not, by an interrupt too, the scratch file goes and `path` stays as it was;
    a killed process leaves the scratch file alone. Folders above are made. A device or a pipe is
    not replaced: it is yielded itself. Raises OSError as the file system does.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        if target.exists():
            scratch.chmod(target.stat().st_mode)
        os.replace(scratch, target)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in one piece, see `replacing`. Raises OSError as the file system does."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
