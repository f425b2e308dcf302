"""Job and Schedule: a pipeline timetable as data, the one source for check, drawing, price and run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
