"""Job and Schedule: a pipeline timetable as data, the one source to check, draw, price and run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.errors import ScheduleError


class JobKind(StrEnum):
    """What a job computes; letters as in PyTorch and the zero-bubble papers."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One cell of a pipeline timetable; prints as ``2F0`` (stage 2, forward, microbatch 0)."""

    kind: JobKind
    stage_index: int
    microbatch_index: int

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind}{self.microbatch_index}"

    @classmethod
    def parse(cls, text: str) -> Job:
        """Inverse of `str`; raise ScheduleError on anything else."""
        match = _JOB.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"job {text!r} is malformed; write stage, kind F, B, I or W, and microbatch: 2F0"
            )
        return cls(
            stage_index=int(match[1]), kind=JobKind(match[2]), microbatch_index=int(match[3])
        )


_JOB = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


def forward(stage_index: int, microbatch_index: int) -> Job:
    """Return the forward job of a stage and microbatch."""
    return Job(kind=JobKind.FORWARD, stage_index=stage_index, microbatch_index=microbatch_index)


def full_backward(stage_index: int, microbatch_index: int) -> Job:
    """Return the job that computes both gradients, of the input and of the weights."""
    return Job(
        kind=JobKind.FULL_BACKWARD, stage_index=stage_index, microbatch_index=microbatch_index
    )


def backward_input(stage_index: int, microbatch_index: int) -> Job:
    """Return the job that computes the input gradient only."""
    return Job(
        kind=JobKind.BACKWARD_INPUT, stage_index=stage_index, microbatch_index=microbatch_index
    )


def backward_weight(stage_index: int, microbatch_index: int) -> Job:
    """Return the job that computes the weight gradients the input-gradient job left."""
    return Job(
        kind=JobKind.BACKWARD_WEIGHT, stage_index=stage_index, microbatch_index=microbatch_index
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Jobs in order for each pp rank: `jobs[pp_rank][position]`.

    `stage_to_pp_rank[stage_index]` says which pp rank holds each stage (loop, V and fold
    placements differ only here). Dependencies follow from the jobs: F of a stage needs F of
    the stage before; B or I needs its own F and B or I of the stage after; W its own I.
    """

    name: str
    stage_to_pp_rank: tuple[int, ...]
    num_microbatches: int
    jobs: tuple[tuple[Job, ...], ...]

    @property
    def pp(self) -> int:
        """Number of pp ranks."""
        return len(self.jobs)

    @property
    def num_stages(self) -> int:
        """Number of stages, pp * vpp."""
        return len(self.stage_to_pp_rank)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages a pp rank holds, in forward order."""
        return tuple(s for s, rank in enumerate(self.stage_to_pp_rank) if rank == pp_rank)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data: one line of jobs, such as ``0F0 0F1 0B0``, for each pp rank."""
        return {
            "name": self.name,
            "stage_to_pp_rank": list(self.stage_to_pp_rank),
            "num_microbatches": self.num_microbatches,
            "jobs": [" ".join(map(str, row)) for row in self.jobs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """Inverse of `to_json`; raise ScheduleError on data of another form.

        The rules of a schedule are not checked here; `validate_schedule` does that.
        """
        try:
            return cls(
                name=str(data["name"]),
                stage_to_pp_rank=tuple(int(rank) for rank in data["stage_to_pp_rank"]),
                num_microbatches=int(data["num_microbatches"]),
                jobs=tuple(tuple(map(Job.parse, row.split())) for row in data["jobs"]),
            )
        except ScheduleError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ScheduleError(
                f"schedule data is malformed ({error!r}); "
                "it needs name, stage_to_pp_rank, num_microbatches and jobs"
            ) from None
