"""Predicted against measured: the jobs, the bubble and the step of a plan that was run.

The simulated timetable is written in the form in which ranks record theirs
(`planner.timeline`), so both are read alike and load side by side in one trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from planner.errors import PlannerError
from planner.language.schedule.step_jobs import step_jobs
from planner.language.schedule.timing.simulate import Timeline
from planner.timeline import (
    JOB_KINDS,
    LEARNING_RATE,
    REMAKE,
    STEP_JOB_KINDS,
    RankTimeline,
    Span,
    bubbles,
)

WARM_UP_STEPS = 3
"""First steps that are left out of medians, where there are more: they allocate and trace."""


_ORDER = (*JOB_KINDS, *STEP_JOB_KINDS)


class JobsAlike(NamedTuple):
    """Jobs of one kind: of a stage, or of a pp rank once a step, where `stage` is -1.

    They sort as tables have them: stage by stage, then the jobs behind the table. `order` is that
    of kinds.
    """

    is_once: bool
    stage: int
    pp_rank: int
    order: int

    @classmethod
    def of(cls, pp_rank: int, stage: int, kind: str) -> JobsAlike:
        """Return the jobs that a span of this kind is one of."""
        return cls(kind in STEP_JOB_KINDS, stage, pp_rank, _ORDER.index(kind))

    @property
    def kind(self) -> str:
        """The kind of job."""
        return _ORDER[self.order]

    @property
    def place(self) -> str:
        """Whose jobs they are, in words."""
        return f"pp rank {self.pp_rank}" if self.is_once else f"stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobComparison:
    """Jobs alike: seconds predicted and the median measured of `count`."""

    jobs: JobsAlike
    predicted_s: float
    measured_s: float
    count: int

    @property
    def ratio(self) -> float:
        """Predicted over measured; infinite where the clock saw no time pass."""
        return self.predicted_s / self.measured_s if self.measured_s else inf


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A plan's prediction beside its run. Steps run from the first span to the last."""

    jobs: tuple[JobComparison, ...]
    """By stage, forward first; then the optimizer and the learning rate, by pp rank."""
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
        spans = [
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
        ]
        if timeline.step_jobs_s:
            once = zip(step_jobs(pp_rank), timeline.step_jobs_s[pp_rank], strict=True)
            spans += [
                Span(kind=str(job.kind), name=str(job), step=0, start_s=start_s, end_s=end_s)
                for job, (start_s, end_s) in once
            ]
        lines.append(
            RankTimeline(rank=pp_rank, pp_rank=pp_rank, clock_offset_s=0.0, spans=tuple(spans))
        )
    return tuple(lines)


def compare_run(
    timeline: Timeline, predicted_step_s: float, measured: Sequence[RankTimeline]
) -> RunComparison:
    """Set a simulated step beside recorded ones.

    Raises PlannerError when the recording holds jobs that the plan does not have, or lacks
    some: it is then of another plan, or of a run that was cut short. Learning-rate jobs are there
    where the engine has a scheduler, of which a plan says nothing.
    """
    predicted = job_seconds(as_rank_timelines(timeline), first_step=0)
    steps = sorted({span.step for line in measured for span in line.spans})
    first = first_steady_step(measured)
    found = job_seconds(measured, first_step=first)
    lacking = {jobs for jobs in set(found) ^ set(predicted) if jobs.kind != LEARNING_RATE}
    if lacking:
        odd = min(lacking)
        raise PlannerError(
            f"job {odd.kind} of {odd.place} is only in the {'run' if odd in found else 'plan'}; "
            "give the timeline of a whole run of this plan"
        )
    kept = [bubble for bubble in bubbles(measured) if bubble.step >= first]
    return RunComparison(
        jobs=tuple(
            JobComparison(
                jobs=jobs,
                predicted_s=median(predicted[jobs]),
                measured_s=median(found[jobs]),
                count=len(found[jobs]),
            )
            for jobs in sorted(found.keys() & predicted.keys())
        ),
        predicted_step_s=predicted_step_s,
        measured_step_s=median(step_seconds(measured, first)),
        predicted_bubble_fraction=timeline.bubble_fraction,
        measured_bubble_fraction=median(bubble.bubble_fraction for bubble in kept),
        num_steps=sum(step >= first for step in steps),
    )


def first_steady_step(measured: Iterable[RankTimeline]) -> int:
    """Return the first recorded step that is not a warm-up."""
    steps = sorted({span.step for line in measured for span in line.spans})
    return steps[min(WARM_UP_STEPS, len(steps) - 1)] if steps else 0


def job_seconds(lines: Iterable[RankTimeline], *, first_step: int) -> dict[JobsAlike, list[float]]:
    """Seconds of all jobs, those alike together; what a backward recomputed ahead is part of it."""
    found: dict[JobsAlike, list[float]] = defaultdict(list)
    for line in lines:
        ahead_s = 0.0
        for span in line.spans:
            if span.step < first_step:
                continue
            seconds = span.end_s - span.start_s
            # A backward's recomputation ahead of its gradients is a span of its own, right before
            # it.
            if span.kind == REMAKE:
                ahead_s = seconds
            elif span.kind in _ORDER:
                jobs = JobsAlike.of(line.pp_rank, span.stage, span.kind)
                found[jobs].append(seconds + ahead_s)
                ahead_s = 0.0
    return dict(found)


def step_seconds(lines: Iterable[RankTimeline], first_step: int) -> list[float]:
    """Seconds of each step from the first span of any rank to the last one's end."""
    bounds: dict[int, list[float]] = {}
    for line in lines:
        for span in line.spans:
            if span.step < first_step:
                continue
            # Each rank's clock starts elsewhere; the offsets lay all of them on one axis.
            start_s, end_s = span.start_s + line.clock_offset_s, span.end_s + line.clock_offset_s
            known = bounds.setdefault(span.step, [start_s, end_s])
            known[0], known[1] = min(known[0], start_s), max(known[1], end_s)
    return [end_s - start_s for start_s, end_s in bounds.values()]
