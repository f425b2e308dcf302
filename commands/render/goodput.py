"""What failures leave of a long training's time, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from commands.render.tables import light_table
from planner.units import DAY_S, HOUR_S, format_seconds

if TYPE_CHECKING:
    from costmodel.failures import Goodput

_PARTS = {
    "useful": "steps that last",
    "checkpoints": "checkpoints",
    "lost": "steps lost at failures",
    "restarting": "restarts",
    "slow": "waiting for slow nodes",
}


def describe_goodput(found: Goodput, *, num_nodes: int, step_s: float) -> list[RenderableType]:
    """Return the parts of the time, and how often to save."""
    table = light_table("part", "share", title="Over weeks, with failures", numbers=("share",))
    for name, label in _PARTS.items():
        if share := getattr(found, name):
            style = "bold" if name == "useful" else ""
            table.add_row(label, f"{share:.1%}", style=style)
    steps = max(1, round(found.interval_s / step_s))
    said = (
        f"A failure every {_duration(found.mtbf_s)} on {num_nodes} nodes; save every "
        f"{_duration(found.interval_s)}, {steps} {'step' if steps == 1 else 'steps'}"
    )
    if found.useful:
        said += f"; a step takes {format_seconds(step_s / found.useful)} of the days"
    return [table, Text(said)]


def _duration(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("hours", HOUR_S), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
