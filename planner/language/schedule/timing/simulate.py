"""When every job of a schedule runs, given what jobs and transfers take: `simulate`.

It times the table that the executor runs. A rank runs its jobs in table order, one at a time,
each as soon as its input has arrived. What a job makes for a stage on another rank goes over the
link between the two ranks while the sender computes on. A full backward may send its input's
gradient before it makes (some of) its weight gradients; everything else leaves at its job's end.

Links that queue carry one message after the other in each direction, as real ones do. Free links
carry any number at once: then a transfer delays the job that waits for it and nothing else, which
is exact for the published bubble formulas and for drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from planner.deadline import check_time
from planner.errors import ScheduleError
from planner.language.schedule.jobs import Job, Schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.job_table import NONE, JobTable, Result, build_job_table

Links = Literal["queue", "free"]
"""Whether messages of one direction wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """A result on its way to a stage of another pp rank."""

    result: Result
    """What it brings."""
    sender: int
    """The pp rank that made it."""
    receiver: int
    """The pp rank whose job needs it."""
    position: int
    """Place of that job in the receiver's row."""
    start_s: float
    """When it leaves: it is ready, and those before it on the link are there."""
    end_s: float
    """When it is there."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Start and end of every job, `start_s[pp_rank][position]`, from the step's start.

    Working and waiting time are those of the table's jobs.
    """

    schedule: Schedule
    """The schedule."""
    start_s: tuple[Sequence[float], ...]
    """When each job of the table starts."""
    end_s: tuple[Sequence[float], ...]
    """When it ends."""
    stuck: Mapping[int, Result] = field(default_factory=dict)
    """The pp ranks that can't go on, with the result that the next job of each waits for; without
    any, the table ends. Entries of such a rank stop before that job."""
    step_jobs_s: tuple[tuple[tuple[float, float], ...], ...] = ()
    """Start and end of each of a pp rank's `step_jobs`; empty where they are not priced."""
    messages: tuple[SentMessage, ...] = ()
    """Messages between pp ranks, by receiver and the job that needs them; empty where they are not
    kept."""

    @cached_property
    def rank_end_s(self) -> tuple[float, ...]:
        """When each pp rank ends its last job."""
        return tuple(ends[-1] if len(ends) else 0.0 for ends in self.end_s)

    @cached_property
    def makespan_s(self) -> float:
        """When the last rank ends."""
        return max(self.rank_end_s, default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each pp rank runs jobs."""
        return tuple(
            float(np.sum(np.asarray(ends) - np.asarray(starts)))
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        )

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds each pp rank waits, up to the end of the last rank."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks' time: (pp-1)/(m+pp-1) for 1F1B with equal stages."""
        total = self.makespan_s * len(self.start_s)
        return sum(self.bubble_s) / total if total else 0.0

    def __iter__(self) -> Iterator[tuple[int, Job, float, float]]:
        """Yield (pp_rank, job, start_s, end_s), rank by rank."""
        for rank, row in enumerate(self.schedule.jobs):
            for job, start, end in zip(row, self.start_s[rank], self.end_s[rank], strict=True):
                yield rank, job, start, end


def simulate(
    schedule: Schedule | JobTable,
    seconds: JobSeconds | None = None,
    *,
    links: Links = "queue",
    at_least: Sequence[np.ndarray] | None = None,
    keeps_messages: bool = False,
) -> Timeline:
    """Return when each job runs; by default one second for each F, I and W, and no transfers.

    `at_least[pp_rank][position]` are seconds that a job takes if it is shorter: what is copied
    beside it; `keeps_messages` says that the timeline has them. Raises ScheduleError when times are
    given for another number of stages, or when the table never ends
    (`planner.language.schedule.validate_schedule` says where).
    """
    timeline = simulate_until_stuck(
        schedule, seconds, links=links, at_least=at_least, keeps_messages=keeps_messages
    )
    if timeline.stuck:
        ranks = ", ".join(map(str, timeline.stuck))
        raise ScheduleError(
            f"schedule {timeline.schedule.name!r} never ends: pp ranks {ranks} wait for ever; "
            "validate_schedule shows where"
        )
    return timeline


def simulate_until_stuck(
    schedule: Schedule | JobTable,
    seconds: JobSeconds | None = None,
    *,
    links: Links = "queue",
    at_least: Sequence[np.ndarray] | None = None,
    keeps_messages: bool = False,
) -> Timeline:
    """Return when each job runs that ever does, and who is `stuck`; else as `simulate`."""
    table = schedule if isinstance(schedule, JobTable) else build_job_table(schedule)
    schedule = table.schedule
    if seconds is None:
        seconds = JobSeconds.equal(schedule.num_stages)
    if len(seconds.forward_s) != schedule.num_stages:
        raise ScheduleError(
            f"times of {len(seconds.forward_s)} stages given for schedule {schedule.name!r} of "
            f"{schedule.num_stages} stages; give one time for each stage"
        )
    kinds = (*seconds.by_kind().values(), *seconds.last_by_kind().values())
    by_kind = np.asarray(kinds).ravel()
    transfer_s = [*seconds.receive_forward_s, *seconds.receive_backward_s]
    each = [by_kind[row.duration] for row in table.rows]
    if at_least is not None:
        each = [np.maximum(*both) for both in zip(each, at_least, strict=True)]
    durations = [seconds_of_rank.tolist() for seconds_of_rank in each]
    none = (0.0,) * schedule.num_stages
    ahead_s = [0.0, *(seconds.sends_ahead_s or none), *(seconds.last_sends_ahead_s or none)]
    earlier = [np.asarray(ahead_s)[row.ahead].tolist() for row in table.rows]

    # A rank runs on while its inputs are there. One that is missing notes who waits for it, and its
    # maker wakes that rank. The order of visits changes nothing: a link has one sender, which fills
    # it in the order of its own row.
    # An arrival below 0 is still to come.
    arrival = [-1.0] * table.num_results
    waiting = [NONE] * table.num_results
    link_free = [0.0] * table.num_links
    queues = links == "queue"
    left_s: dict[int, float] | None = {} if keeps_messages else None
    starts: list[list[float]] = [[] for _ in durations]
    ends: list[list[float]] = [[] for _ in durations]
    runnable = list(range(schedule.pp))
    while runnable:
        check_time()
        rank = runnable.pop()
        row = table.rows[rank]
        needs, makes, links_of_row, transfers = row.needs, row.makes, row.link, row.transfer
        duration, start, end = durations[rank], starts[rank], ends[rank]
        before_end = earlier[rank]
        now = end[-1] if end else 0.0
        # A rank that was woken goes on where it stopped: its lists of times say how far it got.
        for position in range(len(start), len(duration)):
            needed = needs[position]
            if needed >= 0:
                arrived = arrival[needed]
                if arrived < 0.0:
                    waiting[needed] = rank
                    break
                if arrived > now:
                    now = arrived
            start.append(now)
            now += duration[position]
            end.append(now)
            made = makes[position]
            if made >= 0:
                link = links_of_row[position]
                if link >= 0:
                    # The sender computes on meanwhile. A free link is never taken.
                    free, made_at = link_free[link], now - before_end[position]
                    leaves = free if free > made_at else made_at
                    sent = leaves + transfer_s[transfers[position]]
                    if queues:
                        link_free[link] = sent
                    if left_s is not None:
                        left_s[made] = leaves
                    arrival[made] = sent
                else:
                    arrival[made] = now
                if waiting[made] >= 0:
                    # A result has one taker, so at most one rank waits for it.
                    runnable.append(waiting[made])
    stuck = {
        rank: table.result(row.needs[len(done)])
        for rank, (row, done) in enumerate(zip(table.rows, ends, strict=True))
        if len(done) < len(row.needs)
    }
    messages = () if left_s is None else _messages(table, left_s, arrival)
    return Timeline(
        schedule=schedule,
        start_s=tuple(starts),
        end_s=tuple(ends),
        stuck=stuck,
        messages=messages,
    )


def _messages(
    table: JobTable, left_s: Mapping[int, float], arrival: Sequence[float]
) -> tuple[SentMessage, ...]:
    """Return what travelled, of results that left and arrived then."""
    homes, found = table.schedule.stage_to_pp_rank, []
    for receiver, row in enumerate(table.rows):
        for position, needed in enumerate(row.needs):
            if needed not in left_s:
                continue
            result = table.result(needed)
            found.append(
                SentMessage(
                    result=result,
                    sender=homes[result.stage_index],
                    receiver=receiver,
                    position=position,
                    start_s=left_s[needed],
                    end_s=arrival[needed],
                )
            )
    return tuple(found)
