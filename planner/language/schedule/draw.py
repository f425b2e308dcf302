"""Pictures of schedules in text: `draw_schedule` over time, `draw_table` by position.

`draw_schedule` of 1F1B with pp=3 and 4 microbatches (a backward takes two columns):

    1f1b: pp=3, 3 stages, 4 microbatches, 18 columns, bubble 33.3%
    rank 0 | F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
    rank 1 | .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
    rank 2 | .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

With virtual stages a job shows its stage too, as `str(job)` does: ``4F0``. The jobs of
`step_jobs`, where given, stand behind each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from planner.language.schedule.jobs import Job, Schedule
from planner.language.schedule.step_jobs import StepJob
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import Timeline, simulate

_CONTEXT_RANKS, _CONTEXT_POSITIONS = 4, 6
_MOST_COLUMNS_OF_A_JOB = 8


Behind = Sequence[tuple[StepJob, float, float]]
"""A pp rank's jobs behind its row: seconds from the row's end to the job's start, and its own."""


def draw_schedule(
    schedule: Schedule,
    *,
    times: JobSeconds | None = None,
    behind: Sequence[Behind] = (),
    max_columns: int | None = None,
) -> str:
    """Return a picture of the table over time, one line for each pp rank, and of what is `behind`
    each row.

    One column is the shortest job's time (by default that of F, I or W), but no less than an
    eighth of the longest's; other times are rounded to columns. More than `max_columns`
    columns are cut off, with a count of how many; jobs behind the row are named then. Columns and
    bubble of the first line are those of the table alone. Raises ScheduleError when the table
    never ends.
    """
    timeline = simulate(schedule, times, links="free")
    lengths = [end - start for _, _, start, end in timeline if end > start] or [1.0]
    tick = max(min(lengths), max(lengths) / _MOST_COLUMNS_OF_A_JOB)
    label = _labeller(schedule)
    width = max((len(label(job)) for row in schedule.jobs for job in row), default=1) + 1
    rows = [
        _cells(timeline, rank, behind[rank] if behind else (), tick, width, label)
        for rank in range(schedule.pp)
    ]
    num_columns = round(timeline.makespan_s / tick)
    most = max(num_columns, *map(len, rows))
    shown = most if max_columns is None else min(most, max_columns)
    lines = [
        f"{schedule.name}: pp={schedule.pp}, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, {num_columns} columns, "
        f"bubble {timeline.bubble_fraction:.1%}"
    ]
    rank_width = len(str(schedule.pp - 1))
    for rank, cells in enumerate(rows):
        # Dots beyond the table would say that the rank waits, when it may be done.
        cells += ["."] * (num_columns - len(cells)) + [" "] * (most - max(num_columns, len(cells)))
        text = "".join(cell.ljust(width - 1) + " " for cell in cells if cell)
        text = text[: shown * width].rstrip()
        more = ""
        if shown < most:
            cut = [str(job) for job, _, _ in behind[rank]] if behind else []
            more = ", ".join([f" … {most - shown} more columns", *cut])
        lines.append(f"rank {rank:>{rank_width}} | {text}{more}")
    return "\n".join(lines)


def _labeller(schedule: Schedule) -> Callable[[Job], str]:
    """Return the function from a job to its text: the stage is left out where the rank says it."""
    if schedule.num_stages == schedule.pp:
        return lambda job: f"{job.kind}{job.microbatch_index}"
    return str


def _cells(
    timeline: Timeline,
    rank: int,
    behind: Behind,
    tick: float,
    width: int,
    label: Callable[[Job], str],
) -> list[str]:
    """Return a rank's columns up to its last job; those that a job goes on in are empty."""
    jobs, starts, ends = (
        timeline.schedule.jobs[rank],
        timeline.start_s[rank],
        timeline.end_s[rank],
    )
    row = [(label(job), start, end) for job, start, end in zip(jobs, starts, ends, strict=True)]
    row_end = ends[-1] if ends else 0.0
    row += [(str(job), row_end + after, row_end + after + own) for job, after, own in behind]
    cells: list[str] = []
    for name, start, end in row:
        first = round(start / tick)
        num_columns = max(round(end / tick) - first, 1)
        cells += ["."] * (first - len(cells))
        text = name.ljust(num_columns * width - 1, "-" if num_columns > 1 else " ")
        cells += [text] + [""] * (num_columns - 1)
    return cells


def draw_table(rows: Sequence[Sequence[Job]], *, marked: Collection[tuple[int, int]] = ()) -> str:
    """Return the jobs in order, one line for each pp rank, with cells in brackets if marked.

    `marked` holds (pp_rank, position) pairs; a position one past the end marks the place
    where a job is missing. A large table is cut to the surroundings of the marks.
    """
    ranks = _around({rank for rank, _ in marked}, len(rows), _CONTEXT_RANKS)
    longest = max((len(row) for row in rows), default=0) + 1
    positions = _around({position for _, position in marked}, longest, _CONTEXT_POSITIONS)
    width = max((len(str(job)) for rank in ranks for job in rows[rank]), default=1) + 2
    lines = []
    for rank in ranks:
        row, cells = rows[rank], []
        for position in positions:
            text = str(rows[rank][position]) if position < len(row) else ""
            cells.append((f"[{text}]" if (rank, position) in marked else f" {text} ").ljust(width))
        before = "… " if positions.start > 0 else ""
        after = " …" if positions.stop < len(row) else ""
        lines.append(f"rank {rank:>3} | {before}{''.join(cells).rstrip()}{after}")
    if ranks.start > 0:
        lines.insert(0, f"… {ranks.start} ranks")
    if ranks.stop < len(rows):
        lines.append(f"… {len(rows) - ranks.stop} ranks")
    return "\n".join(lines)


def _around(marks: Collection[int], size: int, context: int) -> range:
    """Return the part of range(size) within `context` of the first and last mark."""
    if not marks:
        return range(min(size, 4 * context))
    return range(max(0, min(marks) - context), min(size, max(marks) + context + 1))
