"""Event simulator: when every job of a schedule runs, given what jobs and transfers take.

It prices the table the executor runs. A rank runs its jobs in table order, one at a time,
each as soon as its input has arrived. What a job makes for a stage on another rank goes
over the link between the two ranks, one message after the other in each direction, while
the sender computes on. A full backward may send its input's gradient before it makes (some of)
its weight gradients; everything else leaves at its job's end.

`JobTable` is a schedule turned into flat integer lists once, so that many sets of times are
played on one table; playing touches each job once and makes no object for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from planner.deadline import check_time
from planner.errors import ScheduleError
from planner.language.schedule import SteadySchedule, build_schedule, steady_schedule
from planner.language.schedule.jobs import JobKind, Schedule

_KINDS = {
    JobKind.FORWARD: 0,
    JobKind.FULL_BACKWARD: 1,
    JobKind.BACKWARD_INPUT: 2,
    JobKind.BACKWARD_WEIGHT: 3,
}
NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeconds:
    """Seconds of the jobs of each stage, and of the transfers into it; entries are by stage.

    A full backward takes `backward_input_s + backward_weight_s`.
    """

    forward_s: tuple[float, ...]
    """A forward."""
    backward_input_s: tuple[float, ...]
    """A backward up to its input's gradient."""
    backward_weight_s: tuple[float, ...]
    """The weight gradients that an input-gradient job leaves."""
    receive_forward_s: tuple[float, ...]
    """Transfer of a stage's input from the stage before; ignored within a rank."""
    receive_backward_s: tuple[float, ...]
    """Transfer of a stage's gradient from the stage after; ignored within a rank."""
    last_backward_input_s: tuple[float, ...] | None = None
    """`backward_input_s` of the microbatch whose forward on the stage is the step's last, where
    it differs: it may not be recomputed."""
    sends_ahead_s: tuple[float, ...] | None = None
    """Early send: a full backward's gradient for another rank is ready so long before the job's
    end."""
    last_sends_ahead_s: tuple[float, ...] | None = None
    """The same of the stage's last backward of the step."""

    @classmethod
    def equal(
        cls, num_stages: int, *, forward_s: float, backward_s: float, transfer_s: float = 0.0
    ) -> JobSeconds:
        """Return equal times for every stage; half of the backward is the weight gradient."""
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_input_s=(backward_s / 2,) * num_stages,
            backward_weight_s=(backward_s / 2,) * num_stages,
            receive_forward_s=(transfer_s,) * num_stages,
            receive_backward_s=(transfer_s,) * num_stages,
        )


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
    step_jobs_s: tuple[tuple[tuple[float, float], ...], ...] = ()
    """Start and end of each of a pp rank's `step_jobs`; empty where they are not priced."""

    @cached_property
    def rank_end_s(self) -> tuple[float, ...]:
        """When each pp rank ends its last job."""
        return tuple(ends[-1] if len(ends) else 0.0 for ends in self.end_s)

    @cached_property
    def makespan_s(self) -> float:
        """When the last rank ends."""
        return max(self.rank_end_s)

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


@dataclass(frozen=True, kw_only=True)
class JobTable:
    """A schedule as flat lists, one entry per job and rank.

    Results have numbers: the forward output of stage s and microbatch m is s*M+m, the gradient of
    its input S*M + s*M+m, of S stages and M microbatches.
    """

    schedule: Schedule
    """The schedule."""
    duration: tuple[np.ndarray, ...]
    """Index of each job's seconds: kind * S + stage, where the full and the input-gradient
    backward of a stage's last forward are kinds of their own."""
    needs: tuple[list[int], ...]
    """Result that each job waits for, or NONE."""
    makes: tuple[list[int], ...]
    """Result of each job, or NONE where no other job may have to wait for it."""
    link: tuple[list[int], ...]
    """Directed pair of ranks that the result travels over (sender * pp + receiver), or NONE."""
    transfer: tuple[list[int], ...]
    """Index of the transfer's seconds: stage of the receiver, S + it for gradients."""
    ahead: tuple[np.ndarray, ...]
    """Index of how long before its job's end the result is ready: 0 not at all, 1 + stage of a
    full backward, 1 + S + stage of a stage's last one."""
    num_links: int
    """Directed pairs of ranks."""
    num_results: int
    """Numbers of results."""
    _steady: dict[int, SteadySchedule] = field(default_factory=dict)
    """The schedule without repetitions, by how many jobs receives are posted ahead."""

    def steady(self, *, ahead: int) -> SteadySchedule:
        """Return the schedule without the repetitions in which memory does not change."""
        if ahead not in self._steady:
            self._steady[ahead] = steady_schedule(self.schedule, ahead=ahead)
        return self._steady[ahead]


@lru_cache(maxsize=128)
def job_table(schedule: str, pp: int, vpp: int, num_microbatches: int) -> JobTable:
    """Return a named schedule's table; the last ones are kept, for searches."""
    return build_job_table(
        build_schedule(schedule, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    )


def build_job_table(schedule: Schedule) -> JobTable:
    """Turn a schedule into flat lists; done once per schedule, for any number of plays."""
    placed = np.asarray(schedule.stage_to_pp_rank)
    num_stages, num_microbatches, pp = schedule.num_stages, schedule.num_microbatches, schedule.pp
    size = num_stages * num_microbatches
    # Results are numbered: outputs of (stage, microbatch) first, `size` on their gradients.
    columns: tuple[list, ...] = ([], [], [], [], [], [])
    for rank, row in enumerate(schedule.jobs):
        check_time()
        kind = np.fromiter((_KINDS[job.kind] for job in row), dtype=np.int64, count=len(row))
        stage = np.fromiter((job.stage_index for job in row), dtype=np.int64, count=len(row))
        microbatch = np.fromiter(
            (job.microbatch_index for job in row), dtype=np.int64, count=len(row)
        )
        own = stage * num_microbatches + microbatch
        # The microbatch that a stage runs forward last: its backward may be priced otherwise.
        last = np.full(num_stages, NONE)
        last[stage[kind == 0]] = microbatch[kind == 0]
        is_last = ((kind == 1) | (kind == 2)) & (microbatch == last[stage])
        is_forward, is_gradient = kind == 0, (kind == 1) | (kind == 2)
        # A forward needs the output of the stage before; a backward the gradient that the stage
        # after has made, of its own output.
        needs = np.where(is_forward & (stage > 0), own - num_microbatches, NONE)
        needs = np.where(
            is_gradient & (stage < num_stages - 1), size + own + num_microbatches, needs
        )
        # Nobody waits for what the last stage makes forward, or for the first stage's input
        # gradient.
        makes = np.where(is_forward & (stage < num_stages - 1), own, NONE)
        makes = np.where(is_gradient & (stage > 0), size + own, makes)
        receiver = np.where(
            is_forward, np.minimum(stage + 1, num_stages - 1), np.maximum(stage - 1, 0)
        )
        # Neighbouring stages of one rank hand over in place: no link, no seconds.
        travels = (makes != NONE) & (placed[receiver] != rank)
        link = np.where(travels, rank * pp + placed[receiver], NONE)
        transfer = np.where(is_forward, receiver, num_stages + receiver)
        ends = np.full(num_stages, NONE)  # where each stage's last weight gradients are made
        makes_weights = (kind == 1) | (kind == 3)
        ends[stage[makes_weights]] = np.flatnonzero(makes_weights)
        is_end = np.arange(len(row)) == ends[stage]
        # Durations have six rows of stages: F, B, I, W, and B and I of a stage's last microbatch.
        # (3 more than kind 1 and 2; the last forward itself is no `is_last`.)
        columns[0].append((kind + 3 * is_last) * num_stages + stage)
        # 0: leaves at the job's end; else ahead of it, further in the last job that makes weights.
        columns[1].append(np.where(travels & (kind == 1), 1 + is_end * num_stages + stage, 0))
        for column, values in zip(columns[2:], (needs, makes, link, transfer), strict=True):
            column.append(values.tolist())
    duration, ahead_, needs_, makes_, link_, transfer_ = map(tuple, columns)
    return JobTable(
        schedule=schedule,
        duration=duration,
        needs=needs_,
        makes=makes_,
        link=link_,
        transfer=transfer_,
        ahead=ahead_,
        num_links=pp * pp,
        num_results=2 * size,
    )


def simulate(
    schedule: Schedule | JobTable,
    seconds: JobSeconds,
    *,
    at_least: Sequence[np.ndarray] | None = None,
) -> Timeline:
    """Return when each job runs. `at_least[pp_rank][position]` are seconds that a job takes if
    it is shorter: what is copied beside it.

    Raises ScheduleError when times are given for another number of stages, or when the
    table never ends (`planner.language.schedule.validate_schedule` says where).
    """
    table = schedule if isinstance(schedule, JobTable) else build_job_table(schedule)
    schedule = table.schedule
    if len(seconds.forward_s) != schedule.num_stages:
        raise ScheduleError(
            f"times of {len(seconds.forward_s)} stages given for schedule {schedule.name!r} of "
            f"{schedule.num_stages} stages; give one time for each stage"
        )
    weight, last = seconds.backward_weight_s, seconds.last_backward_input_s
    inputs, last_inputs = seconds.backward_input_s, last or seconds.backward_input_s
    # A full backward makes both gradients in one job.
    full, last_full = (
        [i + w for i, w in zip(each, weight, strict=True)] for each in (inputs, last_inputs)
    )
    by_kind = np.asarray([*seconds.forward_s, *full, *inputs, *weight, *last_full, *last_inputs])
    transfer_s = [*seconds.receive_forward_s, *seconds.receive_backward_s]
    each = [by_kind[index] for index in table.duration]
    if at_least is not None:
        each = [np.maximum(*both) for both in zip(each, at_least, strict=True)]
    durations = [seconds_of_rank.tolist() for seconds_of_rank in each]
    none = (0.0,) * schedule.num_stages
    ready = [0.0, *(seconds.sends_ahead_s or none), *(seconds.last_sends_ahead_s or none)]
    earlier = [np.asarray(ready)[index].tolist() for index in table.ahead]

    # A rank runs on while its inputs are there. One that is missing notes who waits for it, and its
    # maker wakes that rank. The order of visits changes nothing: a link has one sender, which fills
    # it in the order of its own row.
    # An arrival below 0 is still to come.
    arrival = [-1.0] * table.num_results
    waiting = [NONE] * table.num_results
    link_free = [0.0] * table.num_links
    starts: list[list[float]] = [[] for _ in durations]
    ends: list[list[float]] = [[] for _ in durations]
    runnable = list(range(schedule.pp))
    while runnable:
        check_time()
        rank = runnable.pop()
        needs, makes, links, transfers = (
            table.needs[rank], table.makes[rank], table.link[rank], table.transfer[rank],
        )  # fmt: skip
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
                link = links[position]
                if link >= 0:
                    # Messages of one direction queue for their link; the sender computes on.
                    free, made_at = link_free[link], now - before_end[position]
                    sent = (free if free > made_at else made_at) + transfer_s[transfers[position]]
                    link_free[link] = sent
                    arrival[made] = sent
                else:
                    arrival[made] = now
                if waiting[made] >= 0:
                    # A result has one taker, so at most one rank waits for it.
                    runnable.append(waiting[made])
    stuck = [rank for rank, row in enumerate(durations) if len(ends[rank]) < len(row)]
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name!r} never ends: pp ranks {', '.join(map(str, stuck))} wait "
            "for ever; validate_schedule shows where"
        )
    return Timeline(schedule=schedule, start_s=tuple(starts), end_s=tuple(ends))
