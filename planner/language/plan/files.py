"""Plan files: read with checks, written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from planner.errors import PlanError
from planner.files import write_atomically
from planner.language.layout.class_layout import SIZE_FIELDS
from planner.language.plan.plan import PLAN_VERSION, Plan


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises PlanError, in one line, when the file is missing, not JSON, not a plan, of a
    newer version, or inconsistent.
    """
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise PlanError(f"no plan file {path}; make one with: planner search MODEL") from None
    except IsADirectoryError:
        raise PlanError(f"{path} is a directory; give the plan's JSON file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise PlanError(f"{path} is not readable JSON ({error}); search again to make it") from None
    if not isinstance(data, dict) or data.get("format") != "planner-plan":
        raise PlanError(f"{path} is not a plan (no format 'planner-plan'); was it made by search?")
    version = data.get("version")
    if not isinstance(version, int) or not 1 <= version <= PLAN_VERSION:
        raise PlanError(
            f"{path} has plan version {version!r}; this planner reads up to {PLAN_VERSION}; "
            "update planner or search again"
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        # (Sizes of axes are entries of one field in memory, and fields of their own in a file.)
        where = ".".join(str(at) for at in first["loc"] if at not in SIZE_FIELDS) or "plan"
        raise PlanError(
            f"{path} is damaged at {where}: {first['msg']}; search again for it"
        ) from None


def plan_text(plan: Plan) -> str:
    """Return a plan as its file holds it."""
    return json.dumps(plan.model_dump(mode="json"), indent=1) + "\n"


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically, so a killed run leaves the old file or the new one.

    Raises PlanError when the file can't be written.
    """
    target = Path(path)
    if target.is_dir():
        raise PlanError(f"can't write the plan to {path}: it is a directory; name a file in it")
    text = plan_text(plan)
    try:
        write_atomically(target, text)
    except OSError as error:
        raise PlanError(
            f"can't write the plan to {path}: {error.strerror}; choose a folder you can write to"
        ) from None
