"""A schedule turned into flat integer lists, so that many sets of times run on one table.

Results have numbers: the forward output of stage s and microbatch m is s*M+m, the gradient of its
input S*M + s*M+m, of S stages and M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np

from planner.deadline import check_time
from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.language.schedule.registry import build_schedule
from planner.language.schedule.timing.offloads import Offload, offloads_of
from planner.language.schedule.timing.steady import SteadySchedule, steady_schedule

NONE = -1

_LETTERS = "".join(JobKind)
_FORWARD, _FULL_BACKWARD, _INPUT, _WEIGHT = range(len(_LETTERS))
_OF_LAST_FORWARD = "".join((JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT))
"""The kinds whose durations come after those of all kinds, of a stage's last forward."""


class Result(NamedTuple):
    """What a job makes: a forward its output (F), a backward the gradient of its input (G)."""

    kind: Literal["F", "G"]
    stage_index: int
    microbatch_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """The jobs of one pp rank in order; of S stages."""

    duration: np.ndarray
    """Index of each job's seconds: kind * S + stage, where the full and the input-gradient
    backward of a stage's last forward are kinds of their own."""
    needs: list[int]
    """Result that each job waits for, or NONE."""
    makes: list[int]
    """Result of each job, or NONE where no other stage waits for it."""
    link: list[int]
    """Directed pair of ranks that the result travels over (sender * pp + receiver), or NONE."""
    transfer: list[int]
    """Index of the transfer's seconds: stage of the receiver, S + it for gradients."""
    ahead: np.ndarray
    """Index of how long before its job's end the result is ready: 0 not at all, 1 + stage of a
    full backward, 1 + S + stage of a stage's last one."""

    def kinds(self, num_stages: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each job's kind (a letter) and stage, of S = `num_stages` stages."""
        kind, stage = np.divmod(self.duration, num_stages)
        return np.array(list(_LETTERS + _OF_LAST_FORWARD))[kind], stage


@dataclass(frozen=True, kw_only=True)
class JobTable:
    """A schedule, and its rows as flat lists."""

    schedule: Schedule
    """The schedule."""
    rows: tuple[JobRow, ...]
    """The jobs of each pp rank."""
    _steady: dict[int, SteadySchedule] = field(default_factory=dict)
    """The schedule without repetitions, by how many jobs receives are posted ahead."""
    _offloads: dict[frozenset[int], tuple[tuple[Offload, ...], ...]] = field(default_factory=dict)
    """Activations that wait on the host, by whose do."""

    @property
    def num_links(self) -> int:
        """Directed pairs of ranks."""
        return self.schedule.pp**2

    @property
    def num_results(self) -> int:
        """Numbers of results."""
        return 2 * self.schedule.num_stages * self.schedule.num_microbatches

    def result(self, number: int) -> Result:
        """Return the result of a number."""
        is_gradient, own = divmod(number, self.num_results // 2)
        stage, microbatch = divmod(own, self.schedule.num_microbatches)
        return Result("G" if is_gradient else "F", stage, microbatch)

    def with_row(self, pp_rank: int, jobs: Sequence[Job]) -> JobTable:
        """Return the table in which a rank runs these jobs instead."""
        before, after = slice(pp_rank), slice(pp_rank + 1, None)
        given = self.schedule.jobs
        schedule = replace(self.schedule, jobs=(*given[before], tuple(jobs), *given[after]))
        rows = (*self.rows[before], *_job_rows(schedule, (pp_rank,)), *self.rows[after])
        return JobTable(schedule=schedule, rows=rows)

    def steady(self, *, ahead: int) -> SteadySchedule:
        """Return the schedule without the repetitions in which memory does not change."""
        if ahead not in self._steady:
            self._steady[ahead] = steady_schedule(self.schedule, ahead=ahead)
        return self._steady[ahead]

    def offloads(self, stages: frozenset[int]) -> tuple[tuple[Offload, ...], ...]:
        """Return by row which activations wait on the host, where these stages' do."""
        if stages not in self._offloads:
            found = tuple(offloads_of(row, stages) for row in self.schedule.jobs)
            self._offloads[stages] = found
        return self._offloads[stages]


@lru_cache(maxsize=128)
def job_table(schedule: str, pp: int, vpp: int, num_microbatches: int) -> JobTable:
    """Return a named schedule's table; the last ones are kept, for searches."""
    return build_job_table(
        build_schedule(schedule, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    )


def build_job_table(schedule: Schedule) -> JobTable:
    """Turn a schedule into flat lists; done once per schedule, for any number of simulations."""
    return JobTable(schedule=schedule, rows=_job_rows(schedule, range(schedule.pp)))


def _job_rows(schedule: Schedule, pp_ranks: Sequence[int]) -> tuple[JobRow, ...]:
    """Return the rows of these ranks, all jobs at once: arrays have an entry a job."""
    check_time()
    rows = [schedule.jobs[rank] for rank in pp_ranks]
    lengths = list(map(len, rows))
    jobs, count = list(chain.from_iterable(rows)), sum(lengths)
    kind, stage, microbatch = (
        np.fromiter(of_jobs, dtype=np.intp, count=count)
        for of_jobs in (
            map(_LETTERS.index, map(attrgetter("kind"), jobs)),
            map(attrgetter("stage_index"), jobs),
            map(attrgetter("microbatch_index"), jobs),
        )
    )
    rank, position = np.repeat(np.asarray(pp_ranks), lengths), np.arange(count)
    placed = np.asarray(schedule.stage_to_pp_rank)
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    is_forward, is_weight = kind == _FORWARD, kind == _WEIGHT
    is_gradient = ~(is_forward | is_weight)
    output = stage * num_microbatches + microbatch
    gradient = num_stages * num_microbatches + output

    # A forward needs the output of the stage before; a backward the gradient that the stage
    # after has made, of its own output.
    needs = np.where(is_forward & (stage > 0), output - num_microbatches, NONE)
    has_after = stage < num_stages - 1
    needs[is_gradient & has_after] = gradient[is_gradient & has_after] + num_microbatches
    # A backward reads what its own forward saved, deferred weight gradients what their backward
    # put aside: jobs of the same rank. Where such a job is further on, the rank waits for ever.
    made_at = np.full(2 * num_stages * num_microbatches, count)
    made_at[output[is_forward]] = position[is_forward]
    made_at[gradient[is_gradient]] = position[is_gradient]
    reads = np.where(is_gradient, output, gradient)
    waits = ~is_forward & (made_at[reads] > position)
    needs[waits] = reads[waits]

    # Nobody waits for what the last stage makes forward, or for the first stage's input gradient.
    makes = np.where(is_forward & has_after, output, NONE)
    makes[is_gradient & (stage > 0)] = gradient[is_gradient & (stage > 0)]
    receiver = np.where(makes == NONE, stage, np.where(is_forward, stage + 1, stage - 1))
    # Neighbouring stages of one rank hand over in place: no link, no seconds.
    travels = placed[receiver] != rank
    link = np.where(travels, rank * schedule.pp + placed[receiver], NONE)
    transfer = np.where(is_forward, receiver, num_stages + receiver)

    # The microbatch that a stage runs forward last: its backward may be priced otherwise.
    last_forward = np.full(num_stages, NONE)
    last_forward[stage[is_forward]] = microbatch[is_forward]
    is_last = is_gradient & (microbatch == last_forward[stage])
    # The last job that makes a stage's weight gradients.
    makes_weights = is_weight | (kind == _FULL_BACKWARD)
    last_weights = np.full(num_stages, NONE)
    last_weights[stage[makes_weights]] = position[makes_weights]
    # 0: leaves at the job's end; else ahead of it, further in the last job that makes weights.
    ahead = 1 + stage + num_stages * (position == last_weights[stage])
    ahead[~(travels & (kind == _FULL_BACKWARD))] = 0
    # Durations have six rows of stages: F, B, I, W, and B and I of a stage's last microbatch.
    duration = (kind + 3 * is_last) * num_stages + stage

    ends = np.cumsum(lengths).tolist()
    return tuple(
        JobRow(
            duration=duration[begin:end],
            needs=needs[begin:end].tolist(),
            makes=makes[begin:end].tolist(),
            link=link[begin:end].tolist(),
            transfer=transfer[begin:end].tolist(),
            ahead=ahead[begin:end],
        )
        for begin, end in pairwise((0, *ends))
    )
