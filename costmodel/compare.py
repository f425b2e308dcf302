"""Predicted against measured: the jobs, the bubble and the step of a plan that was run.

The simulated timetable is written in the form in which ranks record theirs
(`planner.timeline`), so both are read alike and load side by side in one trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from costmodel.time.simulate import Timeline
from planner.errors import PlannerError
from planner.timeline import JOB_KINDS, REMAKE, RankTimeline, Span, bubbles

WARM_UP_STEPS = 3
"""First steps that are left out of medians, where there are more: they allocate and trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobComparison:
    """One kind of job of one stage: seconds predicted and the median measured of `count`."""

    stage: int
    kind: str
    predicted_s: float
    measured_s: float
    count: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A plan's prediction beside its run. Steps run from the first span to the last."""

    jobs: tuple[JobComparison, ...]
    """By stage, forward first."""
    predicted_step_s: float
    """Seconds of the simulated step."""
    measured_step_s: float
    """Median seconds of the recorded steps."""
    predicted_bubble_fraction: float
    """Part of all ranks' time in which they run no job."""
    measured_bubble_fraction: float
    """The same, median of the recorded steps."""
    num_steps: int
    """Recorded steps, without the first ones that warm up."""


def as_rank_timelines(timeline: Timeline) -> tuple[RankTimeline, ...]:
    """Return a simulated timetable as one recorded step of each pp rank."""
    lines = []
    for pp_rank, jobs in enumerate(timeline.schedule.jobs):
        spans = tuple(
            Span(
                kind=str(job.kind),
                name=f"{job.kind}{job.stage_index}.{job.microbatch_index}",
                step=0,
                start_s=float(start_s),
                end_s=float(end_s),
                stage=job.stage_index,
                microbatch=job.microbatch_index,
            )
            for job, start_s, end_s in zip(
                jobs, timeline.start_s[pp_rank], timeline.end_s[pp_rank], strict=True
            )
        )
        lines.append(RankTimeline(rank=pp_rank, pp_rank=pp_rank, clock_offset_s=0.0, spans=spans))
    return tuple(lines)


def compare_run(
    timeline: Timeline, predicted_step_s: float, measured: Sequence[RankTimeline]
) -> RunComparison:
    """Set a simulated step beside recorded ones.

    Raises PlannerError when the recording holds jobs that the plan does not have, or lacks
    some: it is then of another plan, or of a run that was cut short.
    """
    predicted = _job_seconds(as_rank_timelines(timeline), first_step=0)
    steps = sorted({span.step for line in measured for span in line.spans})
    first = steps[min(WARM_UP_STEPS, len(steps) - 1)] if steps else 0
    found = _job_seconds(measured, first_step=first)
    if set(found) != set(predicted):
        odd = sorted(set(found) ^ set(predicted))[0]
        raise PlannerError(
            f"job {odd[1]} of stage {odd[0]} is only in the {'run' if odd in found else 'plan'}; "
            "give the timeline of a whole run of this plan"
        )
    kept = [bubble for bubble in bubbles(measured) if bubble.step >= first]
    return RunComparison(
        jobs=tuple(
            JobComparison(
                stage=stage,
                kind=kind,
                predicted_s=median(seconds),
                measured_s=median(found[stage, kind]),
                count=len(found[stage, kind]),
            )
            for (stage, kind), seconds in sorted(predicted.items(), key=_in_table_order)
        ),
        predicted_step_s=predicted_step_s,
        measured_step_s=median(_step_seconds(measured, first)),
        predicted_bubble_fraction=timeline.bubble_fraction,
        measured_bubble_fraction=median(bubble.bubble_fraction for bubble in kept),
        num_steps=sum(step >= first for step in steps),
    )


def _in_table_order(item: tuple[tuple[int, str], object]) -> tuple[int, int]:
    stage, kind = item[0]
    return stage, JOB_KINDS.index(kind)


def _job_seconds(
    lines: Iterable[RankTimeline], *, first_step: int
) -> dict[tuple[int, str], list[float]]:
    """Seconds of all jobs by (stage, kind); what a backward recomputed ahead is part of it."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for line in lines:
        ahead_s = 0.0
        for span in line.spans:
            if span.step < first_step:
                continue
            seconds = span.end_s - span.start_s
            if span.kind == REMAKE:
                ahead_s = seconds
            elif span.kind in JOB_KINDS:
                found[span.stage, span.kind].append(seconds + ahead_s)
                ahead_s = 0.0
    return dict(found)


def _step_seconds(lines: Iterable[RankTimeline], first_step: int) -> list[float]:
    """Seconds of each step from the first span of any rank to the last one's end."""
    bounds: dict[int, list[float]] = {}
    for line in lines:
        for span in line.spans:
            if span.step < first_step:
                continue
            start_s, end_s = span.start_s + line.clock_offset_s, span.end_s + line.clock_offset_s
            known = bounds.setdefault(span.step, [start_s, end_s])
            known[0], known[1] = min(known[0], start_s), max(known[1], end_s)
    return [end_s - start_s for start_s, end_s in bounds.values()]
