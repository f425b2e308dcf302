"""Which format a log is in."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from pathlib import Path

from planner.errors import PlannerError
from profiles.logs.deepspeed import DEEPSPEED
from profiles.logs.huggingface import HUGGING_FACE
from profiles.logs.kineto import KINETO
from profiles.logs.megatron import MEGATRON
from profiles.logs.nanotron import NANOTRON
from profiles.logs.record import LogFormat, RunLog
from profiles.logs.torchtitan import TORCHTITAN

FORMATS: tuple[LogFormat, ...] = (KINETO, MEGATRON, TORCHTITAN, NANOTRON, DEEPSPEED, HUGGING_FACE)
"""Tried in this order. Megatron-DeepSpeed prints lines of both, and a trainer with DeepSpeed those
of two, so the one that says more stands first."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def find_log(path: Path) -> RunLog | None:
    """Return what a log or a trace says of a run; None for a file in no known format.

    Raises PlannerError, in one line, where it can't be read.
    """
    held = _bytes_of(path)
    text = _text_of(held)
    found = next((each for each in FORMATS if each.is_of(text)), None)
    if found is None:
        return None
    return found.read(path, text, hashlib.sha256(held).hexdigest()[:16])


def read_log(path: Path) -> RunLog:
    """Return the same; raise PlannerError, in one line, for a file in no known format, too."""
    found = find_log(path)
    if found is None:
        raise PlannerError(
            f"{path} is no log that is known; give one of "
            f"{', '.join(each.stack for each in FORMATS)}, with the lines that tell a step's time"
        )
    return found


def _bytes_of(path: Path) -> bytes:
    try:
        held = path.read_bytes()
        return gzip.decompress(held) if path.suffix == ".gz" else held
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise PlannerError(f"{path} can't be read ({why}); give a log or a trace") from None


def _text_of(held: bytes) -> str:
    # (Progress bars and colours of terminals are no UTF-8 of ours to refuse.)
    return _COLOURS.sub("", held.decode("utf-8", errors="replace"))
