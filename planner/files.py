"""Files: where ours lie, which are a user's own, and writing one in one piece."""

from __future__ import annotations

import functools
import os
import site
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""The folder of `planner`."""
ROOT = PACKAGE.parent
"""The folder that has our packages: a checkout, or where they are installed."""


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


_INSTALLED = tuple(
    str(Path(p).resolve()) + os.sep
    for p in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        str(PACKAGE),
    }
)


@functools.cache
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def real_path(name: str) -> str:
    """Return a path without links. The files of a folder share the walk of its links, which for
    the thousands that torch and a library import takes half a CPU second.
    """
    folder, file = os.path.split(name)
    if not os.path.isabs(folder) or file in ("", ".", ".."):
        return os.path.realpath(name)
    path = os.path.join(_real_folder(folder), file)
    return os.path.realpath(path) if os.path.islink(path) else path


def is_local(name: str) -> bool:
    """Whether a file is neither installed nor part of Python."""
    path = real_path(name) if name else ""
    return (
        bool(path)
        and not path.startswith((*_INSTALLED, "/proc/", "/sys/", "/dev/"))
        and not path.endswith((".pyc", ".so"))
        and not os.path.isdir(path)
    )
