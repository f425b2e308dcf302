"""Files of rows: read whatever spreadsheets and scripts write, write CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.files import replacing

NEEDED = ("gpu", "layers", "hidden", "model", "params_b")
"""A file has the first column, and one of the others."""

LONGEST_CELL = 1 << 24
"""Characters; the csv module alone stops at 131,072."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a table of rows, separated by commas, semicolons or tabs.

    Column names are read in lower case; of two alike, the later becomes ``name (2)``. Cells past
    the last column are left out. Raises PlannerError when there is no table of runs.
    """
    csv.field_size_limit(LONGEST_CELL)
    text = _text(path)
    try:
        table = csv.reader(io.StringIO(text), delimiter=_separator(text))
        lines = [line for line in table if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise PlannerError(
            f"{path} is not a readable CSV ({error}); write it as CSV again"
        ) from None
    columns = list(_columns(lines[0])) if lines else []
    if NEEDED[0] not in columns or not set(columns) & set(NEEDED[1:]):
        raise PlannerError(
            f"{path} lacks column gpu, or all of layers, hidden, model and params_b; use the "
            "columns stack, gpu, layers, hidden, heads, …, as docs/estimate-rows.md lists"
        )
    blank = dict.fromkeys(columns, "")
    return [blank | dict(zip(columns, line, strict=False)) for line in lines[1:]]


def _text(path: Path) -> str:
    """Return a file's text without its byte order mark and NULs."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise PlannerError(f"no file {path}; give a CSV of runs, with column gpu") from None
    except OSError as error:
        raise PlannerError(f"{path} is not readable ({error}); give a CSV of runs") from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = content.decode("utf-16", errors="replace")
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("latin-1")
    return text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")


def _separator(text: str) -> str:
    header = next((line for line in text.splitlines() if line.strip()), "")
    return max(",;\t", key=header.count)


def _columns(header: list[str]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for cell in header:
        name = cell.strip().lower()
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write rows as CSV."""
    with replacing(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(rows)
