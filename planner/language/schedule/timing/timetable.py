"""When each job of a table runs, given what jobs and transfers take: `time_schedule`.

The model: a rank runs its jobs in table order, one at a time, each as soon as its inputs
are there; a transfer between ranks takes `transfer_s` and never delays a job other than the
one that waits for it. That is exact for the published bubble formulas and for drawing;
`costmodel.time.simulate` adds what real links and hosts do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.errors import ScheduleError
from planner.language.schedule.jobs import Job, JobKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What the jobs of each stage take; a full backward takes input plus weight gradient.

    `transfer_s` is the time of one boundary tensor between two pp ranks, either way: one
    number, or one for each boundary, the i-th between stages i and i+1.
    """

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    transfer_s: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        """Raise ScheduleError when lengths differ or a time is negative."""
        parts = (self.forward_s, self.backward_input_s, self.backward_weight_s)
        if len({len(part) for part in parts}) != 1:
            raise ScheduleError(
                "stage times need one entry for each stage in all three lists; "
                f"{len(parts[0])} F, {len(parts[1])} I and {len(parts[2])} W times given"
            )
        transfers = self.transfer_s if isinstance(self.transfer_s, tuple) else (self.transfer_s,)
        if isinstance(self.transfer_s, tuple) and len(transfers) != len(parts[0]) - 1:
            raise ScheduleError(
                f"transfer_s has {len(transfers)} entries; {len(parts[0])} stages have "
                f"{len(parts[0]) - 1} boundaries"
            )
        if min((*transfers, *(t for part in parts for t in part)), default=0.0) < 0:
            raise ScheduleError("stage times must not be negative; give 0 or more")

    @classmethod
    def equal(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1.0,
        backward_input_s: float = 1.0,
        backward_weight_s: float = 1.0,
        transfer_s: float | tuple[float, ...] = 0.0,
    ) -> StageTimes:
        """Return the same times for every stage; by default one second for F, I and W."""
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_input_s=(backward_input_s,) * num_stages,
            backward_weight_s=(backward_weight_s,) * num_stages,
            transfer_s=transfer_s,
        )

    def boundary_s(self, stage_to_pp_rank: Sequence[int]) -> list[float]:
        """Return the transfer time into each stage from the one before; 0 within a rank."""
        seconds = [0.0] * len(stage_to_pp_rank)
        for stage in range(1, len(stage_to_pp_rank)):
            if stage_to_pp_rank[stage] != stage_to_pp_rank[stage - 1]:
                given = self.transfer_s
                seconds[stage] = given[stage - 1] if isinstance(given, tuple) else given
        return seconds

    def by_kind(self) -> dict[JobKind, tuple[float, ...]]:
        """Return the seconds of each stage for each job kind."""
        full = tuple(
            i + w for i, w in zip(self.backward_input_s, self.backward_weight_s, strict=True)
        )
        return {
            JobKind.FORWARD: self.forward_s,
            JobKind.FULL_BACKWARD: full,
            JobKind.BACKWARD_INPUT: self.backward_input_s,
            JobKind.BACKWARD_WEIGHT: self.backward_weight_s,
        }


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """Start and end of every job, in seconds from the start: `start_s[pp_rank][position]`."""

    schedule: Schedule
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @cached_property
    def step_s(self) -> float:
        """When the last job of any rank ends."""
        return max((row[-1] for row in self.end_s if row), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Time each pp rank computes."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Time each pp rank waits between 0 and `step_s`."""
        return tuple(self.step_s - busy for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Part of all ranks' time spent waiting: (pp-1)/(m+pp-1) for 1F1B of equal stages."""
        total = self.step_s * self.schedule.pp
        return sum(self.bubble_s) / total if total else 0.0

    def __iter__(self) -> Iterator[tuple[int, Job, float, float]]:
        """Yield (pp_rank, job, start_s, end_s), rank by rank."""
        for rank, row in enumerate(self.schedule.jobs):
            for job, start, end in zip(row, self.start_s[rank], self.end_s[rank], strict=True):
                yield rank, job, start, end


class Playback:
    """A run of the table, rank by rank, as far as it will go; mutable while it runs.

    `start_s` and `end_s` grow as jobs run. A rank that can't go on has its next position in
    `stuck` with the result it waits for; an empty `stuck` proves that the table ends.

    Results are kept in flat lists indexed by stage * num_microbatches + microbatch, since a
    table of 64 ranks, 8 chunks and 512 microbatches has half a million jobs.
    """

    def __init__(self, schedule: Schedule, times: StageTimes) -> None:
        if len(times.forward_s) != schedule.num_stages:
            raise ScheduleError(
                f"times of {len(times.forward_s)} stages given for schedule {schedule.name!r} "
                f"of {schedule.num_stages} stages; give one time for each stage"
            )
        self.schedule = schedule
        self.start_s: list[list[float]] = [[] for _ in schedule.jobs]
        self.end_s: list[list[float]] = [[] for _ in schedule.jobs]
        self.stuck: dict[int, tuple[str, int, int]] = {}
        self._play(times)

    def _play(self, times: StageTimes) -> None:
        schedule = self.schedule
        num_microbatches, last_stage = schedule.num_microbatches, schedule.num_stages - 1
        # By stage * num_microbatches + microbatch: when the result was made, None before.
        size = schedule.num_stages * num_microbatches
        forward_end: list[float | None] = [None] * size
        gradient_end: list[float | None] = [None] * size
        # By stage: the activation's way into it, which the gradient's way back takes as long as.
        delay = times.boundary_s(schedule.stage_to_pp_rank)
        seconds = times.by_kind()
        waiting: dict[tuple[str, int], int] = {}
        clock = [0.0] * schedule.pp
        runnable = list(range(schedule.pp))
        # Each rank runs on until an input is missing; the job that makes that input wakes it. When
        # no rank can go on, those left in `stuck` wait for each other.
        while runnable:
            rank = runnable.pop()
            now, row = clock[rank], schedule.jobs[rank]
            starts, ends = self.start_s[rank], self.end_s[rank]
            # From where the rank was stopped.
            for position in range(len(starts), len(row)):
                job = row[position]
                kind, stage = job.kind, job.stage_index
                index = stage * num_microbatches + job.microbatch_index
                missing: tuple[str, int] | None = None
                ready = now
                if kind is JobKind.FORWARD:
                    # Stage 0 has its batch from the start.
                    if stage:
                        arrived = forward_end[index - num_microbatches]
                        if arrived is None:
                            missing = ("F", index - num_microbatches)
                        else:
                            ready = max(now, arrived + delay[stage])
                elif kind is JobKind.BACKWARD_WEIGHT:
                    if gradient_end[index] is None:
                        missing = ("G", index)
                # A backward reads what its own forward saved.
                elif forward_end[index] is None:
                    missing = ("F", index)
                # The last stage makes the gradient of its own loss.
                elif stage < last_stage:
                    arrived = gradient_end[index + num_microbatches]
                    if arrived is None:
                        missing = ("G", index + num_microbatches)
                    else:
                        ready = max(now, arrived + delay[stage + 1])
                # At most one other rank waits for a result. A
                # rank that waits for its own never goes on.
                if missing is not None:
                    waiting[missing] = rank
                    result, index = missing
                    self.stuck[rank] = (result, *divmod(index, num_microbatches))
                    break
                now = ready + seconds[kind][stage]
                starts.append(ready)
                ends.append(now)
                if kind is JobKind.FORWARD:
                    forward_end[index] = now
                    woken = waiting.pop(("F", index), None) if waiting else None
                elif kind is JobKind.BACKWARD_WEIGHT:
                    continue
                else:
                    gradient_end[index] = now
                    woken = waiting.pop(("G", index), None) if waiting else None
                if woken is not None:
                    del self.stuck[woken]
                    runnable.append(woken)
            clock[rank] = now


def time_schedule(schedule: Schedule, times: StageTimes | None = None) -> Timetable:
    """Return when each job runs; `times` default to one second for each F, I and W.

    Raises ScheduleError when the table never ends; `validate_schedule` says where.
    """
    play = Playback(schedule, times or StageTimes.equal(schedule.num_stages))
    if play.stuck:
        ranks = ", ".join(map(str, sorted(play.stuck)))
        raise ScheduleError(
            f"schedule {schedule.name!r} never ends: pp ranks {ranks} wait for ever; "
            "validate_schedule shows where"
        )
    return Timetable(
        schedule=schedule,
        start_s=tuple(map(tuple, play.start_s)),
        end_s=tuple(map(tuple, play.end_s)),
    )
