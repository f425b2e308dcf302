"""`planner doctor`: whether this machine can train, and what to fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands.common.options import JsonOption
from commands.render.console import show_json, show_progress, show_results

if TYPE_CHECKING:
    from planner.nodes.check import Check


def doctor(
    as_json: JsonOption = False,
) -> int:
    """Check this machine, and say what to fix.

    Libraries, GPUs, memory, limits, disk, network, and two ranks that exchange.

    Several nodes are checked against each other by `planner launch --preflight`.

    Example: planner doctor
    """
    from commands.render.node_checks import describe_findings
    from planner.doctor import diagnose

    with show_progress("checking") as progress:
        checks = [*diagnose(progress), *_profile_here()]
    if as_json:
        told = ("name", "found", "state", "advice")
        show_json({"findings": [{field: getattr(c, field) for field in told} for c in checks]})
    else:
        show_results(*describe_findings(checks))
    return 1 if any(check.problems for check in checks) else 0


def _profile_here() -> list[Check]:
    """Whether this machine was measured: plans stand on it."""
    from planner.errors import PlannerError
    from planner.nodes.check import judged
    from profiles import default_profile

    try:
        profile, note = default_profile()
    except PlannerError as error:
        return [judged("profile", str(error), warning="measure it again: `measure_profile`")]
    if not note:
        return [judged("profile", f"measured: {profile.name}")]
    return [
        judged(
            "profile",
            f"not measured; plans assume {profile.name}",
            warning="`measure_profile` measures this machine, or name its kind with `profile`",
        )
    ]
