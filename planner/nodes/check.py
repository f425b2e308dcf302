"""What a check of one node, or of nodes beside each other, found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: its name, what was planned (if anything) and found, and what is wrong with it.

    Attributes:
        name: what was checked.
        found: what there is, or how many problems there are.
        planned: what a plan counts on; empty where nothing is planned.
        problems: what keeps planner from training here, or what to do about it, a line each.
        warnings: the same of what costs speed, or will matter elsewhere.
    """

    name: str
    found: str
    planned: str = ""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """The worst of it."""
        return "problem" if self.problems else "warning" if self.warnings else "ok"

    @property
    def advice(self) -> str:
        """Its first line, of a problem if there is one; empty where all is in order."""
        return next(iter(self.problems + self.warnings), "")


def judged(name: str, found: str, *, problem: str = "", warning: str = "") -> Check:
    """Return a check that found this, with the advice that is given, if any."""
    return Check(
        name=name,
        found=found,
        problems=(problem,) if problem else (),
        warnings=(warning,) if warning else (),
    )
