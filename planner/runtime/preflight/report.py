"""What preflight tells: a line for each check, and a line for each problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from planner.nodes.check import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """An exchange as it was measured.

    Attributes:
        axis: the mesh axis, several of them together, "pp", or "nodes".
        kind: of collective.
        ranks: that exchange.
        nodes: their hosts, each once.
        num_bytes: of the whole tensor.
        seconds: measured, of one exchange.
        planned_s: by the profile that the plan was priced with, where there is one.
    """

    axis: str
    kind: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    num_bytes: int
    seconds: float
    planned_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the whole tensor in a second."""
        return self.num_bytes / self.seconds

    @property
    def factor(self) -> float:
        """Measured over planned seconds; 0 without a planned time."""
        return self.seconds / self.planned_s if self.planned_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What preflight found. Without problems the plan can train here.

    Attributes:
        nodes: hosts, in the order of their ranks.
        checks: in the order in which they were made.
        rates: every exchange that was measured.
        start_s: seconds from when all nodes had come to when all ranks had.
        checks_s: seconds from then on.
        is_first: whether this is the process that tells; the others have the same report.
    """

    nodes: tuple[str, ...]
    checks: tuple[Check, ...]
    rates: tuple[Rate, ...]
    start_s: float
    checks_s: float
    is_first: bool

    @property
    def problems(self) -> tuple[str, ...]:
        """Those of all checks, a line each."""
        return tuple(problem for check in self.checks for problem in check.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        data = {"is_good": not self.problems, "problems": list(self.problems), **asdict(self)}
        del data["is_first"]
        for check in data["checks"]:
            del check["warnings"]  # it has none: what is wrong between nodes is a problem
        return data


def check_of(name: str, found: str, problems: Iterable[str], *, planned: str = "") -> Check:
    """Return a check, whose problems are counted in place of what was `found` if there are any."""
    told = tuple(problems)
    text = f"{len(told)} problem{'s' * (len(told) > 1)}" if told else found
    return Check(name=name, planned=planned, found=text, problems=told)
