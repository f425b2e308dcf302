"""What checks of nodes print: those of `planner doctor` and of `planner launch --preflight`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.tables import light_table
from planner.nodes.check import Check

if TYPE_CHECKING:
    from planner.runtime.preflight import Report

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def _table(checks: Sequence[Check], *columns: str) -> Table:
    """Return a table with a row for each check: these of its fields, and its state."""
    table = light_table("check", *columns, "")
    for check in checks:
        told = (Text(getattr(check, column)) for column in columns)
        table.add_row(check.name, *told, Text(check.state, _STYLES[check.state]))
    return table


def describe_findings(checks: Sequence[Check]) -> list[RenderableType]:
    """Return a table of the doctor's checks, a line of advice for each trouble, and a verdict."""
    parts: list[RenderableType] = [_table(checks, "found")]
    for wanted in ("problem", "warning"):
        parts += [
            Text(f"{wanted}: {check.name}: {with_flags(check.advice)}", _STYLES[wanted])
            for check in checks
            if check.state == wanted
        ]
    problems = sum(check.state == "problem" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    if problems:
        verdict = f"{problems} problem{'s' * (problems > 1)}: this machine can't train yet"
    elif warnings:
        verdict = f"this machine can train; {warnings} warning{'s' * (warnings > 1)}"
    else:
        verdict = "this machine can train"
    return [*parts, Text(verdict)]


def describe_preflight(report: Report) -> list[RenderableType]:
    """Return a table with a row for each check."""
    return [_table(report.checks, "planned", "found")]


def problem_lines(report: Report) -> list[str]:
    """Return a line for each problem, whole however long it is, and one that counts them."""
    lines = [f"problem: {with_flags(problem)}" for problem in report.problems]
    count = f"{len(lines)} problem{'s' * (len(lines) != 1)}"
    took = f"ranks took {report.start_s:.1f} s to start, the checks {report.checks_s:.1f} s"
    return [*lines, f"{count}; {took}"]
