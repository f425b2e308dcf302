"""A predicted timeline for people: when each pipeline rank works and when it waits."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from costmodel.simulate import JobSeconds, Timeline
from planner.describe import draw_timetable
from planner.schedule import StageTimes
from planner.units import format_seconds


def describe_timeline(timeline: Timeline, seconds: JobSeconds) -> list[RenderableType]:
    """Return the timetable drawn to scale and each pipeline rank's working and waiting time."""
    ranks = Table("pp rank", "jobs", "works", "waits", "bubble", "ends")
    rows = zip(timeline.busy_s, timeline.bubble_s, timeline.rank_end_s, strict=True)
    for rank, (busy_s, bubble_s, end_s) in enumerate(rows):
        ranks.add_row(
            str(rank),
            str(len(timeline.schedule.jobs[rank])),
            format_seconds(busy_s),
            format_seconds(bubble_s),
            f"{bubble_s / timeline.makespan_s:.1%}",
            format_seconds(end_s),
        )
    # The picture has one transfer time for all boundaries; the figures below it do not.
    times = StageTimes(
        forward_s=seconds.forward_s,
        backward_input_s=seconds.backward_input_s,
        backward_weight_s=seconds.backward_weight_s,
        transfer_s=max((*seconds.receive_forward_s, *seconds.receive_backward_s), default=0.0),
    )
    return [draw_timetable(timeline.schedule, times), ranks]
