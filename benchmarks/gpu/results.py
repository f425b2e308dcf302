"""What parts of a run leave: a line of JSON a check, appended at once, so that a cut keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["pass", "fail", "slow", "not run", "done", "cut"]
"""Of a check; `done` and `cut` (its time limit ended it) are of a whole part."""

WHOLE = "(whole part)"
"""The check's name in the line that ends a part."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One check."""

    part: str
    check: str
    status: Status
    seconds: float = 0.0
    """Wall time."""
    measured: dict[str, float] = field(default_factory=dict)
    """By name, its unit in it (`step_s`, `tensor_bytes`)."""
    predicted: dict[str, float] = field(default_factory=dict)
    """By the same names, where there is a prediction."""
    note: str = ""
    """In words: why it failed, what was found."""
    about: dict[str, str] = field(default_factory=dict)
    """Provenance: device, driver, torch, date, command."""


def append(out: Path, result: Result) -> None:
    """Add a line to the results of a folder, and see that it is on the disk."""
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(out: Path) -> list[Result]:
    """Return the results of a folder; a line that a kill left half is left out."""
    path = out / "results.jsonl"
    if not path.exists():
        return []
    return list(_parsed(path.read_text().splitlines()))


def _parsed(lines: list[str]) -> Iterator[Result]:
    for line in lines:
        try:
            known: dict[str, Any] = json.loads(line)
            yield Result(**known)
        except (ValueError, TypeError):
            continue


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a part is run with, in a process of its own."""

    out: Path
    """The folder of results."""
    device: Literal["cuda", "cpu"]
    seconds: float
    """Its time limit; what does not fit is left out."""
    expected: Path | None
    """The folder with plans and predictions that were made beforehand."""
    known: frozenset[str] = frozenset()
    """Checks that have a result: not run again."""
    about: dict[str, str] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """Whether sizes are for a trial on a CPU."""
        return self.device == "cpu"
