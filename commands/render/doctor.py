"""What `planner doctor` prints: a table of all checks, and what to do, the problems first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.tables import light_table
from planner.doctor import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def describe_findings(findings: Sequence[Finding]) -> list[RenderableType]:
    """Return a table of the checks, a line of advice for each trouble, and a verdict."""
    table = light_table("check", "found", "")
    for finding in findings:
        state = Text(finding.state, _STYLES[finding.state])
        table.add_row(finding.name, Text(finding.found), state)
    parts: list[RenderableType] = [table]
    for wanted in ("problem", "warning"):
        parts += [
            Text(f"{wanted}: {finding.name}: {with_flags(finding.advice)}", _STYLES[wanted])
            for finding in findings
            if finding.state == wanted
        ]
    problems = sum(finding.state == "problem" for finding in findings)
    warnings = sum(finding.state == "warning" for finding in findings)
    if problems:
        verdict = f"{problems} problem{'s' * (problems > 1)}: this machine can't train yet"
    elif warnings:
        verdict = f"this machine can train; {warnings} warning{'s' * (warnings > 1)}"
    else:
        verdict = "this machine can train"
    return [*parts, Text(verdict)]
