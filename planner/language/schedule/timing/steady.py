"""A table of jobs without the repetitions that change nothing.

Between fill and drain a pipeline repeats itself: the same jobs, microbatches counted on. What a
rank holds at the same place of two repetitions is the same then, but for the losses that it
gathers, so the fullest sample of a row is found without a walk through all of them:

    1f1b, rank 0 of 2    F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 ... B63
    shortened            F0 F1 B0 F2 B1 F3 B2 F4 B3 | F5 B4 B5         58 microbatches left out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import NamedTuple

from planner.language.schedule.jobs import Job, JobKind, Schedule

_PERIODS_KEPT = 3
"""Repetitions that stay before any is left out: what begins once (the first gradient) has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadySchedule:
    """A schedule, and what of its repetitions is left out of every row."""

    schedule: Schedule
    """What is left, its microbatches renumbered."""
    gaps: tuple[int, ...]
    """For each pp rank the position before which jobs are left out."""
    left_out: int = 0
    """Microbatches that are left out."""

    @classmethod
    def whole(cls, schedule: Schedule) -> SteadySchedule:
        """Return a schedule of which nothing is left out."""
        return cls(schedule=schedule, gaps=(0,) * schedule.pp)


class _Middle(NamedTuple):
    """A part of a row in which row[i + period] is row[i], `step` microbatches on."""

    first: int
    end: int
    period: int
    step: int


def steady_schedule(schedule: Schedule, *, ahead: int) -> SteadySchedule:
    """Return a schedule whose rows have the same samples of memory, each perhaps less often.

    All rows leave out the same microbatches, so that what ranks send to each other stays in order:
    whole repetitions of each row's middle. `ahead` jobs past a gap are of the middle still, as
    receives are posted so many jobs ahead. A schedule with a row that has no such middle, or that
    would not be complete without, comes back as it is.
    """
    middles = []
    for row in schedule.jobs:
        middle = _middle_of(row)
        if middle is None:
            return SteadySchedule.whole(schedule)
        middles.append(middle)
    # The least number of microbatches that is a whole number of repetitions in every row.
    step = lcm(*(middle.step for middle in middles))
    times = min(
        (middle.end - middle.first - (_PERIODS_KEPT + 1) * middle.period - ahead)
        * middle.step
        // (middle.period * step)
        for middle in middles
    )
    if times <= 0:
        return SteadySchedule.whole(schedule)
    left_out = times * step
    gaps = tuple(middle.first + _PERIODS_KEPT * middle.period for middle in middles)
    rows = tuple(
        _without(row, gap, left_out // middle.step * middle.period, left_out)
        for row, gap, middle in zip(schedule.jobs, gaps, middles, strict=True)
    )
    # A microbatch that waits all through the middle is the same one in every repetition: without
    # repetitions its jobs are another's.
    if not all(map(_is_complete, rows)):
        return SteadySchedule.whole(schedule)
    num_microbatches = schedule.num_microbatches - left_out
    shorter = replace(schedule, jobs=rows, num_microbatches=num_microbatches)
    return SteadySchedule(schedule=shorter, gaps=gaps, left_out=left_out)


def _without(row: Sequence[Job], gap: int, num_jobs: int, left_out: int) -> tuple[Job, ...]:
    """Return a row without so many jobs from a gap on, later microbatches renumbered."""
    later = (
        replace(job, microbatch_index=job.microbatch_index - left_out)
        for job in row[gap + num_jobs :]
    )
    return (*row[:gap], *later)


def _is_complete(row: Sequence[Job]) -> bool:
    """Whether what goes forward on a stage comes back, and what is deferred is done."""
    forward, back, deferred, weights = (
        {(job.stage_index, job.microbatch_index) for job in row if job.kind in kinds}
        for kinds in (
            (JobKind.FORWARD,),
            (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT),
            (JobKind.BACKWARD_INPUT,),
            (JobKind.BACKWARD_WEIGHT,),
        )
    )
    return forward == back and deferred == weights


def _middle_of(row: Sequence[Job]) -> _Middle | None:
    """Return the part around a row's middle that repeats itself most often."""
    centre = len(row) // 2
    here = row[centre]
    num_stages = len({job.stage_index for job in row})
    forward, back = (
        list(accumulate((job.kind in kinds for job in row[centre:]), initial=0))
        for kinds in ((JobKind.FORWARD,), (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT))
    )
    for period in range(1, len(row) // (_PERIODS_KEPT + 2)):
        there = row[centre + period]
        step = there.microbatch_index - here.microbatch_index
        if (there.kind, there.stage_index) != (here.kind, here.stage_index) or step <= 0:
            continue
        # In a whole repetition each stage of the rank runs so many forwards and backwards.
        if not forward[period] == back[period] == num_stages * step:
            continue
        first, end = centre, centre + period + 1
        while first > 0 and _repeats(row[first - 1], row[first - 1 + period], step):
            first -= 1
        while end < len(row) and _repeats(row[end - period], row[end], step):
            end += 1
        if end - first > (_PERIODS_KEPT + 1) * period:
            return _Middle(first, end, period, step)
    return None


def _repeats(job: Job, later: Job, step: int) -> bool:
    """Whether a job is another one so many microbatches on."""
    return (
        later.microbatch_index == job.microbatch_index + step
        and later.stage_index == job.stage_index
        and later.kind is job.kind
    )
