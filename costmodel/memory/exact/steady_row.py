"""A rank's row of jobs without the repetitions that change nothing.

Between warmup and cooldown a pipeline repeats itself: the same jobs, microbatches counted on. What
a rank holds at the same place of two repetitions is then the same, but for the losses it gathers,
so whoever wants the worst sample of a row need not go through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from planner.schedule.jobs import Job, JobKind

_PERIODS_KEPT = 3
"""Repetitions gone through before any is left out: what begins once has started by then."""


class SteadyRow(NamedTuple):
    """Jobs of a row from which so many microbatches are left out before job `gap`."""

    jobs: tuple[Job, ...]
    gap: int = 0
    left_out: int = 0


@lru_cache(maxsize=4096)
def steady_row(row: tuple[Job, ...], *, ahead: int) -> SteadyRow:
    """Return a row with the same samples, each perhaps less often; microbatches are renumbered.

    With p jobs to a repetition that moves on by d microbatches, row[i + p] is row[i] with d added,
    for all i of its middle. Whole repetitions are taken out of that, and k * d taken off the
    microbatches after. A repetition and `ahead` jobs past the gap are still of the middle, as
    receives are posted so many jobs ahead. A row without such a middle comes back as it is.
    """
    found = _middle_of(row)
    if found is None:
        return SteadyRow(row)
    first, end, period, step = found
    kept = _PERIODS_KEPT * period
    gone = (end - first - kept - period - ahead) // period
    if gone <= 0:
        return SteadyRow(row)
    gap, moved = first + kept, gone * step
    rest = row[gap + gone * period :]
    shorter = row[:gap] + tuple(
        Job(
            kind=job.kind,
            stage_index=job.stage_index,
            microbatch_index=job.microbatch_index - moved,
        )
        for job in rest
    )
    # A microbatch that waits all through the middle is the same one in every repetition.
    return SteadyRow(shorter, gap, moved) if _is_complete(shorter) else SteadyRow(row)


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


def _middle_of(row: Sequence[Job]) -> tuple[int, int, int, int] | None:
    """Return (first, end, jobs of a period, microbatches it moves on) around the row's middle."""
    centre = len(row) // 2
    here = row[centre]
    num_stages = len({job.stage_index for job in row})
    forward, back = (
        list(accumulate((job.kind in kinds for job in row[centre:]), initial=0))
        for kinds in ((JobKind.FORWARD,), (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT))
    )
    for period in range(1, len(row) - centre):
        there = row[centre + period]
        step = there.microbatch_index - here.microbatch_index
        if (there.kind, there.stage_index) != (here.kind, here.stage_index) or step <= 0:
            continue
        # Fewer forwards or backwards than that are of a lesser repetition.
        if not forward[period] == back[period] == num_stages * step:
            continue
        first, end = centre, centre + period + 1
        while first > 0 and _repeats(row[first - 1], row[first - 1 + period], step):
            first -= 1
        while end < len(row) and _repeats(row[end - period], row[end], step):
            end += 1
        if end - first > (_PERIODS_KEPT + 1) * period:
            return first, end, period, step
        if period > len(row) // (_PERIODS_KEPT + 2):
            return None
    return None


def _repeats(job: Job, later: Job, step: int) -> bool:
    """Whether a job is another one so many microbatches on."""
    return (
        later.microbatch_index == job.microbatch_index + step
        and later.stage_index == job.stage_index
        and later.kind is job.kind
    )
