"""The jobs of a whole step: a schedule's rows, and what each rank does once behind its row.

    rank 0 | 0F0 0F1 0B0 0B1 O L
    rank 1 | 1F0 1B0 1F1 1B1 O L

O is the optimizer's step over all that the rank trains; L sets the learning rate of the next step,
where there is a scheduler. They are of a rank and not of a stage, since one optimizer holds the
parameters of all stages of its rank. A rank's O waits for the sums of its own gradients alone, so
it runs beside the backwards of other ranks; where gradients are clipped, or looked at for NaN
(`check_values`), for a number from every rank.

They are no cells of a `Schedule`: their place follows from it, so tables in plans, tables of
plugins and tables for other systems hold F, B, I and W. `step_jobs` is the one place that puts
them there, for pictures, prices and the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from planner.errors import ScheduleError
from planner.language.schedule.jobs import Job, JobKind, Schedule


class StepJobKind(StrEnum):
    """What a rank does once a step."""

    OPTIMIZER = "O"
    LEARNING_RATE = "L"


class Role(StrEnum):
    """What a part of a training step is for; each kind of job has one role."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LEARNING_RATE = "learning rate"


ROLES: dict[JobKind | StepJobKind, Role] = {
    JobKind.FORWARD: Role.FORWARD,
    JobKind.FULL_BACKWARD: Role.BACKWARD,
    JobKind.BACKWARD_INPUT: Role.BACKWARD,
    JobKind.BACKWARD_WEIGHT: Role.BACKWARD,
    StepJobKind.OPTIMIZER: Role.OPTIMIZER,
    StepJobKind.LEARNING_RATE: Role.LEARNING_RATE,
}


def find_role(name: str) -> Role:
    """Return the role of a name such as ``backward``; raise ScheduleError for an unknown one."""
    try:
        return Role(name)
    except ValueError:
        raise ScheduleError(
            f"role {name!r} is unknown; the jobs of a step are {', '.join(Role)}"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """What a pp rank does once a step; prints as its kind, ``O``."""

    kind: StepJobKind
    pp_rank: int

    def __str__(self) -> str:
        return str(self.kind)


def step_jobs(pp_rank: int) -> tuple[StepJob, ...]:
    """Return what a pp rank does behind its row of any table, in order.

    The rate comes last, as in a script that calls ``scheduler.step()`` after its optimizer: it is
    the next step's.
    """
    return tuple(StepJob(kind=kind, pp_rank=pp_rank) for kind in StepJobKind)


def jobs_of_step(schedule: Schedule) -> Iterator[Job | StepJob]:
    """Yield all jobs of a step of a schedule, rank by rank."""
    for rank, row in enumerate(schedule.jobs):
        yield from row
        yield from step_jobs(rank)


def jobs_of_role(schedule: Schedule, role: str) -> Iterator[Job | StepJob]:
    """Yield the jobs of a role in a step of a schedule, rank by rank.

    Raises ScheduleError for an unknown role.
    """
    wanted = find_role(role)
    for job in jobs_of_step(schedule):
        if ROLES[job.kind] is wanted:
            yield job
