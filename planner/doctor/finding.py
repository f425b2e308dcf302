"""What a check of the doctor found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "problem"]
"""A problem keeps planner from training here; a warning costs speed, or will matter elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: its name, what was found, whether that is in order, and else what to do."""

    name: str
    found: str
    state: State = "ok"
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


def judged(name: str, found: str, *, problem: str = "", warning: str = "") -> Finding:
    """Return a finding whose state follows from the advice that is given, if any."""
    state: State = "problem" if problem else "warning" if warning else "ok"
    return Finding(name=name, found=found, state=state, advice=problem or warning)
