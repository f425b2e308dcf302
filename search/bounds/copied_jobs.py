"""By how much copies of activations lengthen a rank's jobs, without simulating its table.

Beside which jobs copies run follows from the order of a row alone
(`planner.language.schedule.timing.offloads`), and a job takes as long as the longest of its own
work and the two copies beside it. With n jobs of a kind that take t each beside copies of `down`
and `up` seconds, a row is longer than its jobs by

    sum over kinds of  n max(0, max(down, up) - t)

which is exact, whatever the jobs wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.language.schedule import Job, JobKind
from planner.language.schedule.timing.offloads import Offload

BySeconds = Mapping[JobKind, Any]
"""Seconds of a job of each kind, by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedJobs:
    """Jobs of a kind and a stage with the same copies beside them: activations of stage `leaving`
    go to the host, those of stage `arriving` return.
    """

    kind: JobKind
    stage: int
    leaving: int | None
    arriving: int | None
    count: int

    def extra_s(self, job_s: BySeconds, down_s: Any, up_s: Any) -> Any:
        """Return by how much the copies lengthen them all; a copy's seconds are by stage."""
        # A link carries both directions at once, so the longer copy counts.
        longest: Any = 0.0
        if self.leaving is not None:
            longest = np.maximum(longest, down_s[self.leaving])
        if self.arriving is not None:
            longest = np.maximum(longest, up_s[self.arriving])
        return self.count * np.maximum(0.0, longest - job_s[self.kind][self.stage])


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRow:
    """A rank's jobs beside copies: all of them, those between its first forward and its first
    backward, and those between its last forward and the last backward that sends a gradient on.
    """

    whole: tuple[CopiedJobs, ...]
    filling: tuple[CopiedJobs, ...]
    draining: tuple[CopiedJobs, ...]

    @classmethod
    def of(cls, row: Sequence[Job], copies: Sequence[Offload]) -> CopiedRow:
        """Return those of a row in which these copies are made."""
        # A job has a forward ahead of it and a backward behind it at most: positions are unique.
        leaving = {copy.leaving: copy.stage_index for copy in copies}
        arriving = {copy.arriving: copy.stage_index for copy in copies}
        forwards = [at for at, job in enumerate(row) if job.kind is JobKind.FORWARD]
        sending = [
            at
            for at, job in enumerate(row)
            if job.kind in (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT)
        ]

        def between(first: int, end: int) -> tuple[CopiedJobs, ...]:
            # (kind, stage, stage that leaves, stage that
            # arrives), and how often: a row has few of them.
            counts = Counter(
                (row[at].kind, row[at].stage_index, leaving.get(at), arriving.get(at))
                for at in range(first, end)
                if at in leaving or at in arriving
            )
            return tuple(
                CopiedJobs(kind=kind, stage=stage, leaving=there, arriving=back, count=count)
                for (kind, stage, there, back), count in counts.items()
            )

        return cls(
            whole=between(0, len(row)),
            filling=between(forwards[0] + 1, sending[0]),
            draining=between(forwards[-1] + 1, sending[-1]),
        )


def extra_s(jobs: Iterable[CopiedJobs], job_s: BySeconds, down_s: Any, up_s: Any) -> Any:
    """Return by how much copies lengthen some jobs together."""
    return sum(beside.extra_s(job_s, down_s, up_s) for beside in jobs)


def seconds_by_kind(forward_s: Any, backward_s: Any, weight_s: Any) -> BySeconds:
    """Return what jobs take, of which `weight_s` where backward is split."""
    return {
        JobKind.FORWARD: forward_s,
        JobKind.FULL_BACKWARD: backward_s,
        JobKind.BACKWARD_INPUT: backward_s - weight_s,
        JobKind.BACKWARD_WEIGHT: weight_s,
    }
