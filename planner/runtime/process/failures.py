"""Why a rank failed, as the first rank to fail leaves it for the launcher in a file.

The first to fail is the cause: what its end does to others comes after it. A rank that was killed
leaves nothing, and those that then miss it say that they lost a peer.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

FAILURE_FILE = "PLANNER_FAILURE_FILE"
"""Names the file the first rank to fail creates."""

Kind = Literal["user", "script", "library", "peer", "killed", "values", "memory", "hang"]
"""A mistake of the user's; an exception, or another end, of the script; of what runs no script of
the user's; a peer that is gone; a rank ended by the system or by somebody; a NaN or infinity; no
memory; nothing moves."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What the first rank to fail says.

    Attributes:
        kind: what happened.
        rank: the rank it happened on.
        code: the exit code of a run that ends with it.
        text: what the launcher prints; empty where the rank has printed it.
        peak_bytes: with kind "memory", the most that the rank held before.
    """

    kind: Kind
    rank: int
    code: int = 1
    text: str = ""
    peak_bytes: int | None = None


def claim(failure: Failure) -> bool:
    """Leave a failure for the launcher; whether this rank is the first, and there is a launcher."""
    path = os.environ.get(FAILURE_FILE)
    if not path:
        return False
    try:
        with open(path, "x") as file:
            json.dump(asdict(failure), file)
    except (FileExistsError, FileNotFoundError):  # or the launcher is gone and has cleaned up
        return False
    return True


def read_failure(path: Path) -> Failure | None:
    """Return what was left, if anything: a rank may be killed while it writes."""
    try:
        return Failure(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return None


def end_process(code: int) -> NoReturn:
    """End this process at once, with all that it has printed."""
    # Interpreter shutdown would wait for peers in process-group destructors, and may abort
    # when it meets a thread of torch's.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
