"""How many microbatches are live where, read off a table: what sets the activation memory.

A microbatch is live on a stage from its F job until its last job there, B or W. (After I,
part of what F saved is already free; counting it until W errs on the safe side.)
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.language.schedule.jobs import JobKind, Schedule

_CHANGE = {
    JobKind.FORWARD: 1,
    JobKind.FULL_BACKWARD: -1,
    JobKind.BACKWARD_INPUT: 0,
    JobKind.BACKWARD_WEIGHT: -1,
}


def in_flight_profile(schedule: Schedule, pp_rank: int) -> list[int]:
    """Return the live microbatch-stages of a pp rank while each of its jobs runs.

    A job that frees a microbatch still holds it while it runs.
    """
    profile, live = [], 0
    for job in schedule.jobs[pp_rank]:
        change = _CHANGE[job.kind]
        profile.append(live + max(change, 0))
        live += change
    return profile


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each pp rank the most microbatch-stages live at once, over all its stages."""
    return tuple(max(in_flight_profile(schedule, r), default=0) for r in range(schedule.pp))


def in_flight_per_stage(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most microbatches live at once.

    Stages of one rank peak at different times, so their sum may exceed `in_flight`.
    """
    live = [0] * schedule.num_stages
    peak = [0] * schedule.num_stages
    for row in schedule.jobs:
        for job in row:
            stage = job.stage_index
            live[stage] += _CHANGE[job.kind]
            peak[stage] = max(peak[stage], live[stage])
    return tuple(peak)


def most_kept(schedule: Schedule, weight: Sequence[float]) -> tuple[float, ...]:
    """Return for each pp rank the most that its live microbatches keep at once at least.

    `weight[stage]` is what one keeps there, from its F job until its first backward job.
    """
    peaks = []
    for row in schedule.jobs:
        now = most = 0.0
        for job in row:
            if job.kind is JobKind.FORWARD:
                now += weight[job.stage_index]
                most = max(most, now)
            # The least that is certain: what a split backward frees in I is let go there.
            elif job.kind is not JobKind.BACKWARD_WEIGHT:
                now -= weight[job.stage_index]
        peaks.append(most)
    return tuple(peaks)


def in_flight_at_rank_peak(
    schedule: Schedule, weight: tuple[float, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return for each pp rank the live microbatches of every stage at its heaviest moment.

    `weight[stage]` is what one live microbatch of a stage takes, such as its saved bytes; the
    heaviest moment of a rank is where the weighted sum over its stages is largest.
    """
    peaks = []
    for row in schedule.jobs:
        live = [0] * schedule.num_stages
        now = heaviest = 0.0
        at_peak = tuple(live)
        for job in row:
            change = _CHANGE[job.kind]
            live[job.stage_index] += change
            now += change * weight[job.stage_index]
            if now > heaviest:
                heaviest, at_peak = now, tuple(live)
        peaks.append(at_peak)
    return tuple(peaks)
