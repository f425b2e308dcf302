"""What ranks exchange in a step, by lane, for people: what of it compute hides, and what shows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import RenderableType

from commands.render.tables import light_table
from planner.timeline import RankTimeline, lane_seconds
from planner.units import format_seconds


def medians(line: RankTimeline) -> dict[str, tuple[float, float]]:
    """Return seconds beside compute and exposed of a rank's lanes, medians over its steps."""
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for each in lane_seconds(line):
        by_lane.setdefault(each.lane, []).append((each.hidden_s, each.exposed_s))
    return {
        lane: (median(hidden_s for hidden_s, _ in found), median(shown_s for _, shown_s in found))
        for lane, found in by_lane.items()
    }


def describe_lanes(lines: Sequence[RankTimeline]) -> list[RenderableType]:
    """Return a row for each lane, of the rank on which most of it is exposed."""
    found = {line.rank: medians(line) for line in lines}
    lanes = dict.fromkeys(lane for line in lines for lane in found[line.rank])
    if not lanes:
        return []
    numbers = ("beside compute", "exposed")
    table = light_table(
        "lane", "most on rank", *numbers, title="Exchanged in a step", numbers=numbers
    )
    for lane in lanes:
        rank = max(
            (rank for rank, of_rank in found.items() if lane in of_rank),
            key=lambda rank: (found[rank][lane][1], found[rank][lane][0]),
        )
        table.add_row(lane, str(rank), *map(format_seconds, found[rank][lane]))
    return [table]
