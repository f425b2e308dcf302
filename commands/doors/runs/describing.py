"""Which reader a configuration goes to, and one row of all that configure a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commands.doors.runs.deepspeed import DEEPSPEED
from commands.doors.runs.described import Configuration, DescribedRun
from commands.doors.runs.huggingface import HUGGING_FACE
from commands.doors.runs.megatron import MEGATRON
from commands.doors.runs.nanotron import NANOTRON
from commands.doors.runs.table import TABLE
from commands.doors.runs.torchtitan import TORCHTITAN
from planner.errors import PlannerError

CONFIGURATIONS: tuple[Configuration, ...] = (
    HUGGING_FACE,
    DEEPSPEED,
    TORCHTITAN,
    NANOTRON,
    MEGATRON,
    TABLE,
)
"""Kinds of files; what a later one says stands over what an earlier one does: a model's sizes, then
the run of a system, then what its user writes beside it."""


def is_configuration(path: Path) -> bool:
    """Whether a file is of a kind that configures runs."""
    return _kind_of(path) is not None


def describe(
    files: Sequence[Path],
    *,
    told: Mapping[str, Any] | None = None,
    asked: Mapping[str, Any] | None = None,
) -> DescribedRun:
    """Return a run as a row: what its log tells of it (`told`), over that what its files say, over
    that what was asked for beside them (`asked`).

    Raises PlannerError, in one line, for a file of no known kind, a broken one, and for a run whose
    devices nothing says.
    """
    kinds = {path: _kind_of(path) for path in files}
    if unknown := [str(path) for path, kind in kinds.items() if kind is None]:
        raise PlannerError(
            f"{unknown[0]} configures no run that is known; give "
            f"{', '.join(each.name for each in CONFIGURATIONS)}"
        )
    beside = [path for path, kind in kinds.items() if kind is TABLE]
    row: dict[str, Any] = dict(told or {})
    known = row | {
        name: value for path in beside for name, value in TABLE.read(path, {}).row.items()
    }
    known |= asked or {}
    notes: list[str] = []
    for configuration in CONFIGURATIONS:
        for path, kind in kinds.items():
            if kind is configuration:
                found = configuration.read(path, known)
                row |= found.row
                notes += found.notes
    row |= asked or {}
    named = ", ".join(map(str, files)) or "the log"
    for column, what in (("gpus", "on how many devices"), ("gpu", "on which device")):
        if not row.get(column):
            raise PlannerError(
                f"{named} does not say {what} it ran; give --{column}, or {column} = ... in a "
                "run.toml beside it"
            )
    return DescribedRun(row=row, notes=tuple(notes))


def _kind_of(path: Path) -> Configuration | None:
    return next((each for each in CONFIGURATIONS if each.is_for(path)), None)
