"""The files of a run by what they are: its log, its trace, what configures it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.doors.runs.describing import CONFIGURATIONS, is_configuration
from planner.errors import PlannerError
from planner.units import GIB
from profiles.logs import RunLog, find_log

ENDINGS = ("", ".log", ".txt", ".out", ".err", ".json", ".gz", ".toml", ".yaml", ".yml", ".sh")
"""Of files that are looked into where a folder is given."""

LARGEST_BYTES = 2 * GIB
"""A larger file of a folder is none of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run's files."""

    name: str
    """What the run is called: its folder, or its log."""
    log: RunLog
    """Tells its step; of a run with nothing but a trace that."""
    trace: RunLog | None
    """Tells the parts of its step."""
    configurations: tuple[Path, ...]
    """What configures it."""
    notes: tuple[str, ...]
    """What the user should hear of how they were chosen."""

    @property
    def told(self) -> dict[str, Any]:
        """Columns that the log and the trace state."""
        return {**(self.trace.said if self.trace else {}), **self.log.said}


def find_run(text: str) -> RunFiles:
    """Return the files of a run: those of a folder, or files that commas separate.

    Raises PlannerError, in one line, where a file is missing or none tells what a step took.
    """
    folder = Path(text)
    if folder.is_dir():
        files = [each for each in sorted(folder.iterdir()) if _may_tell(each)]
    else:
        files = [Path(part.strip()) for part in text.split(",") if part.strip()]
        if missing := next((each for each in files if not each.is_file()), None):
            raise PlannerError(
                f"{missing} is no file; give a run's folder, or its log and configuration with a "
                "comma between"
            )
    logs = [found for found in map(find_log, files) if found is not None]
    read = {each.path for each in logs}
    left = [each for each in files if each not in read]
    configurations = tuple(each for each in left if is_configuration(each))
    if not folder.is_dir() and (unknown := [e for e in left if e not in configurations]):
        raise PlannerError(
            f"{unknown[0]} is neither a log that is known nor a configuration; give "
            f"{', '.join(each.name for each in CONFIGURATIONS)}, and a log"
        )
    if not logs:
        raise PlannerError(
            f"{text} has no log that is known; give one with the lines that tell a step's time, of "
            "Megatron-LM, torchtitan, nanotron, DeepSpeed or Hugging Face, or a trace"
        )
    traces = [each for each in logs if each.parts is not None]
    told = [each for each in logs if each.parts is None]
    # (A trainer writes what it took into several files; the one that says most counts.)
    log = max(told, key=lambda each: len(each.readings), default=traces[0] if traces else None)
    assert log is not None, "there is a log or a trace"
    others = [each.path.name for each in (*told, *traces[1:]) if each is not log]
    notes = (f"{text}: of its logs {log.path.name} is read, not {', '.join(others)}",) * bool(
        others
    )
    return RunFiles(
        name=folder.name if folder.is_dir() else log.path.name,
        log=log,
        trace=traces[0] if traces else None,
        configurations=configurations,
        notes=notes,
    )


def _may_tell(path: Path) -> bool:
    is_read = path.is_file() and not path.name.startswith(".") and path.suffix in ENDINGS
    return is_read and path.stat().st_size <= LARGEST_BYTES
