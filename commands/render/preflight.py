"""What `planner launch --preflight` prints: a table, and a line for each problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.tables import light_table

if TYPE_CHECKING:
    from planner.runtime.preflight import Report


def describe_preflight(report: Report) -> list[RenderableType]:
    """Return a table with a row for each check."""
    table = light_table("check", "planned", "found", "")
    for check in report.checks:
        state = Text("problem", "red") if check.problems else Text("ok", "green")
        table.add_row(check.name, check.planned, check.found, state)
    return [table]


def problem_lines(report: Report) -> list[str]:
    """Return a line for each problem, whole however long it is, and one that counts them."""
    lines = [f"problem: {with_flags(problem)}" for problem in report.problems]
    count = f"{len(lines)} problem{'s' * (len(lines) != 1)}"
    took = f"ranks took {report.start_s:.1f} s to start, the checks {report.checks_s:.1f} s"
    return [*lines, f"{count}; {took}"]
