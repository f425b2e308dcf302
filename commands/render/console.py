"""What commands show: progress and notes on stderr, results on stdout, traces in files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.render.flags import with_flags
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.timeline import RankTimeline

Progress = Callable[[float, str], None]
"""Called by long work with the fraction done (0..1) and what is being done."""


_stage = ""


def begin_stage(doing: str) -> None:
    """Note what the command is doing now, for the line of an error that nobody expected."""
    global _stage
    _stage = doing


def stage() -> str:
    """Return what the command is doing, or was when it failed."""
    return _stage


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """Show a bar on stderr while the body runs; yields the function that moves it.

    What moves it says the stage of the work, too.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=min(40, console.width // 6)),
        TimeElapsedColumn(),
        # Only what is being done is cut where the screen is narrow.
        TextColumn("{task.fields[doing]}", table_column=Column(ratio=1, no_wrap=True)),
    )
    with Progress(
        *columns, console=console, transient=True, expand=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None, doing="")  # pulses until something moves it

        begin_stage(title)

        def move(fraction: float, doing: str) -> None:
            begin_stage(f"{title}, {doing}")
            bar.update(task, total=1.0, completed=fraction, doing=doing)

        yield move


def check_writable(path: Path | None, what: str, given: Sequence[Path | None] = ()) -> None:
    """Refuse a file that could not be written after long work, or would replace one `given`."""
    if path is None:
        return
    if any(file is not None and file.resolve() == path.resolve() for file in given):
        raise PlannerError(f"writing {what} to {path} would replace what is read; name another")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    trouble = ""
    if path.is_dir():
        trouble = "it is a directory"
    elif not folder.is_dir():
        trouble = f"{folder} is a file"
    elif not os.access(folder, os.W_OK):
        trouble = f"{folder} is not yours to write to"
    if trouble:
        raise PlannerError(
            f"can't write {what} to {path}: {trouble}; "
            "name another file, in a folder you can write to"
        )


def show_note(text: str | None) -> None:
    """Print a line beside the results, if there is one."""
    if text:
        print(with_flags(text), file=sys.stderr)


def show_results(*renderables: Any) -> None:
    """Print what rich can render."""
    begin_stage("printing the results")
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=120)  # a file or a log has room
    for renderable in renderables:
        console.print(renderable, crop=False)  # a long command is not cut


def show_json(data: Mapping[str, Any]) -> None:
    """Print a command's answer as one JSON document; numbers that are none become null."""
    begin_stage("printing the results")
    print(json.dumps(_plain(data), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: text keys, no infinity, no tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def show_written(text: str, as_json: bool = False) -> None:
    """Print a line of what was written: on stderr where stdout has a JSON document."""
    print(text, file=sys.stderr if as_json else sys.stdout)


def write_trace(
    path: Path | None, *, as_json: bool = False, **timelines: Sequence[RankTimeline]
) -> None:
    """Write timelines, each under its name, where a trace was asked for."""
    if path is None:
        return
    from planner.timeline import save_trace

    save_trace(path, timelines)
    show_written(f"wrote {path}; open it in chrome://tracing or ui.perfetto.dev", as_json)
