"""Runs for people: simulated, recorded, and the prediction beside the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from commands.render.plans.plan import Timetable
from commands.render.tables import light_table
from planner.language.schedule.draw import Behind
from planner.language.schedule.step_jobs import StepJobKind, step_jobs
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import Timeline
from planner.timeline import RankBubble, RankTimeline, bubbles, dealt_by_work
from planner.units import format_seconds

if TYPE_CHECKING:
    from costmodel.compare import RunComparison


def describe_timeline(timeline: Timeline, seconds: JobSeconds) -> list[RenderableType]:
    """Return the timetable drawn to scale and each pipeline rank's working and waiting time."""
    once = timeline.step_jobs_s
    numbers = ["jobs", "works", "waits", "bubble", "ends"]
    numbers += ["optimizer", "step ends"] if once else []
    ranks = light_table("pp rank", *numbers, numbers=numbers)
    behind: list[Behind] = []
    rows = zip(timeline.busy_s, timeline.bubble_s, timeline.rank_end_s, strict=True)
    for rank, (busy_s, bubble_s, end_s) in enumerate(rows):
        jobs = step_jobs(rank) if once else ()
        behind.append(
            [
                (job, start_s - end_s, done_s - start_s)
                for job, (start_s, done_s) in zip(jobs, once[rank] if once else (), strict=True)
            ]
        )
        row = [
            str(rank),
            str(len(timeline.schedule.jobs[rank]) + len(jobs)),
            format_seconds(busy_s),
            format_seconds(bubble_s),
            f"{bubble_s / timeline.makespan_s:.1%}",
            format_seconds(end_s),
        ]
        if once:
            took_s = [own for job, _, own in behind[rank] if job.kind is StepJobKind.OPTIMIZER]
            row += [format_seconds(sum(took_s)), format_seconds(once[rank][-1][1])]
        ranks.add_row(*row)
    # The picture has one transfer time for all boundaries; the figures below it do not.
    times = JobSeconds.of_stages(
        forward_s=seconds.forward_s,
        backward_input_s=seconds.backward_input_s,
        backward_weight_s=seconds.backward_weight_s,
        transfer_s=max((*seconds.receive_forward_s, *seconds.receive_backward_s), default=0.0),
    )
    return [Timetable(timeline.schedule, times, behind), ranks]


def describe_recording(timeline: Sequence[RankTimeline]) -> list[RenderableType]:
    """Return how long each rank's jobs of a step were, how much of that it waited, and its
    optimizer.
    """
    by_rank: dict[int, list[RankBubble]] = {}
    for bubble in bubbles(timeline):
        by_rank.setdefault(bubble.rank, []).append(bubble)
    numbers = ("steps", "median pipeline", "compute", "collectives", "bubble", "optimizer")
    table = light_table("rank", "pp rank", *numbers, numbers=numbers)
    for rank, found in sorted(by_rank.items()):
        table.add_row(
            str(rank),
            str(found[0].pp_rank),
            str(len(found)),
            format_seconds(median(bubble.step_s for bubble in found)),
            format_seconds(median(bubble.compute_s for bubble in found)),
            format_seconds(median(bubble.collective_s for bubble in found)),
            f"{median(bubble.bubble_fraction for bubble in found):.1%}",
            format_seconds(median(bubble.optimizer_s for bubble in found)),
        )
    return [table, *map(Text, dealt_by_work(timeline))]


def describe_run(comparison: RunComparison) -> list[RenderableType]:
    """Return predicted against measured seconds of each job, of the step, and the bubbles."""
    numbers = ("predicted", "measured", "predicted / measured", "jobs timed")
    table = light_table("where", "job", *numbers, numbers=numbers)
    for job in comparison.jobs:
        table.add_row(
            job.jobs.place,
            job.jobs.kind,
            format_seconds(job.predicted_s),
            format_seconds(job.measured_s),
            f"{job.ratio:.2f}",
            str(job.count),
        )
    table.add_row(
        "",
        "step",
        format_seconds(comparison.predicted_step_s),
        format_seconds(comparison.measured_step_s),
        f"{comparison.predicted_step_s / comparison.measured_step_s:.2f}",
        f"{comparison.num_steps} steps",
        style="bold",
    )
    ratio = comparison.measured_step_s / comparison.predicted_step_s
    verdict = (
        f"a step took {format_seconds(comparison.measured_step_s)}, {ratio:.2f} times the "
        f"{format_seconds(comparison.predicted_step_s)} predicted"
    )
    bubble = (
        f"bubble: {comparison.predicted_bubble_fraction:.1%} predicted, "
        f"{comparison.measured_bubble_fraction:.1%} measured"
    )
    return [Text(verdict, style="bold"), table, Text(bubble)]
