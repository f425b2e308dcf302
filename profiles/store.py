"""Profile directories on disk: read with every record checked, written atomically."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from planner.errors import ProfileError
from planner.files import write_atomically
from profiles.records import SCHEMA_VERSION, CollectiveRecord, OpRecord, ProfileFile

PROFILE_FILE = "profile.json"
OPS_FILE = "ops.csv"
COLLECTIVES_FILE = "collectives.csv"
SESSION_FILE = "measuring.json"
"""There while a measurement is under way or was stopped: the conditions it runs under."""

_LISTS = frozenset(("shapes", "visits", "paces"))
"""Columns that hold JSON lists."""

_R = TypeVar("_R", OpRecord, CollectiveRecord)


def read_profile_file(directory: Path) -> ProfileFile:
    """Read profile.json; raise ProfileError, in one line, if it is missing or damaged."""
    path = directory / PROFILE_FILE
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        if (directory / SESSION_FILE).exists():
            raise ProfileError(
                f"the measurement in {directory} was stopped before its end; "
                "run `measure_profile` as before to resume it"
            ) from None
        raise ProfileError(
            f"{directory} has no {PROFILE_FILE}, so it is not a profile; "
            "make one with `measure_profile`"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise ProfileError(
            f"{path} is not readable JSON ({error}); delete {directory} and profile again"
        ) from None
    if not isinstance(data, dict) or data.get("format") != "planner-profile":
        raise ProfileError(
            f"{path} is not a profile (no format 'planner-profile'); give the directory of one"
        )
    version = data.get("version")
    if version != SCHEMA_VERSION:
        raise ProfileError(
            f"{path} has schema version {version!r}; this planner reads version "
            f"{SCHEMA_VERSION}; profile again into a new directory"
        )
    try:
        return ProfileFile.model_validate(data)
    except ValidationError as error:
        raise ProfileError(
            f"{path} is damaged at {_first(error)}; mend it, or profile again"
        ) from None


def read_ops(directory: Path) -> tuple[OpRecord, ...]:
    """Read ops.csv; raise ProfileError naming the line that is damaged."""
    return _read_csv(directory / OPS_FILE, OpRecord)


def read_collectives(directory: Path) -> tuple[CollectiveRecord, ...]:
    """Read collectives.csv; raise ProfileError naming the line that is damaged."""
    return _read_csv(directory / COLLECTIVES_FILE, CollectiveRecord)


def write_profile_file(directory: Path, profile: ProfileFile) -> None:
    """Write profile.json atomically."""
    text = json.dumps(profile.model_dump(mode="json"), indent=1) + "\n"
    _write(directory / PROFILE_FILE, text)


def write_ops(directory: Path, records: Iterable[OpRecord]) -> None:
    """Write ops.csv atomically."""
    _write_csv(directory / OPS_FILE, OpRecord, records)


def write_collectives(directory: Path, records: Iterable[CollectiveRecord]) -> None:
    """Write collectives.csv atomically."""
    _write_csv(directory / COLLECTIVES_FILE, CollectiveRecord, records)


def read_session(directory: Path) -> dict[str, Any] | None:
    """Return the conditions of the measurements in a directory; None if there are none."""
    try:
        return dict(json.loads((directory / SESSION_FILE).read_text()))
    except FileNotFoundError:
        if (directory / PROFILE_FILE).exists():
            return dict(read_profile_file(directory).conditions)
        return None
    except (ValueError, OSError) as error:
        raise ProfileError(
            f"{directory / SESSION_FILE} is not readable JSON ({error}); delete it and run again"
        ) from None


def write_session(directory: Path, conditions: dict[str, Any]) -> None:
    """Note that a measurement under these conditions is under way."""
    _write(directory / SESSION_FILE, json.dumps(conditions, indent=1) + "\n")


def remove_session(directory: Path) -> None:
    """Note that the measurement has ended."""
    (directory / SESSION_FILE).unlink(missing_ok=True)


def check_writable(directory: Path) -> None:
    """Make the directory and raise ProfileError now if a file can't be written to it."""
    if directory.exists() and not directory.is_dir():
        raise ProfileError(f"{directory} is a file; profiles are directories: give another `out`")
    _write(directory / ".writable", "")
    (directory / ".writable").unlink(missing_ok=True)


def _columns(record_type: type[BaseModel]) -> list[str]:
    # What was measured first, its provenance last: pydantic lists inherited fields first.
    own = [n for n in record_type.model_fields if n in record_type.__annotations__]
    return own + [n for n in record_type.model_fields if n not in own]


def _read_csv(path: Path, record_type: type[_R]) -> tuple[_R, ...]:
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        raise ProfileError(
            f"profile {path.parent} has no {path.name}; profile again, or restore the file"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(
            f"{path} is not readable CSV ({error}); profile again into a new directory"
        ) from None
    columns = _columns(record_type)
    if not rows or rows[0] != columns:
        raise ProfileError(
            f"{path} does not start with the columns {','.join(columns)}; "
            "profile again into a new directory"
        )
    return tuple(
        _parse_row(path, line, record_type, columns, row)
        for line, row in enumerate(rows[1:], start=2)
    )


def _parse_row(
    path: Path, line: int, record_type: type[_R], columns: Sequence[str], row: Sequence[str]
) -> _R:
    if len(row) != len(columns):
        raise ProfileError(
            f"{path} line {line} has {len(row)} fields instead of {len(columns)}; "
            "delete that line, or profile again"
        )
    values: dict[str, Any] = dict(zip(columns, row, strict=True))
    values = {name: None if text == "" else text for name, text in values.items()}
    try:
        for name in _LISTS.intersection(values):
            values[name] = json.loads(values[name] or "[]")
        return record_type.model_validate(values)
    except ValidationError as error:
        reason = _first(error)
    except ValueError as error:
        reason = f"a list of numbers: not JSON ({error})"
    raise ProfileError(
        f"{path} line {line} is damaged at {reason}; mend or delete that line, or profile again"
    )


def _write_csv(path: Path, record_type: type[BaseModel], records: Iterable[BaseModel]) -> None:
    from io import StringIO

    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = _columns(record_type)
    writer.writerow(columns)
    for record in records:
        writer.writerow([_cell(getattr(record, name)) for name in columns])
    _write(path, text.getvalue())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return json.dumps(value, separators=(",", ":"))
    return repr(value) if isinstance(value, float) else str(value)


def _write(path: Path, text: str) -> None:
    """Write in one piece: a killed run leaves the old file or the new one."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ProfileError(
            f"can't write {path}: {error.strerror or error}; free some space or give another `out`"
        ) from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the top'}: {first['msg']}"
