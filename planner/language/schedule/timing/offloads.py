"""Which activations leave a device between their forward and their backward, and when.

In a row of jobs, what forward i keeps for backward j may wait on the host:

    position   i      i+1      i+2 ... j-2   j-1       j
    device     saved  offload  -             prefetch  used

It is offloaded while the job after the forward runs and prefetched while the job before the
backward runs, so it is offloaded only if at least one job is run without it: j - i >= 4.
The runtime, the memory model and the simulator all read the same offloads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner.language.schedule.jobs import Job, JobKind

_SHORTEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The activations of one microbatch on one stage; `forward` and `backward` are positions."""

    stage_index: int
    microbatch_index: int
    forward: int
    backward: int

    @property
    def leaving(self) -> int:
        """The position of the job that runs while they are copied to the host."""
        return self.forward + 1

    @property
    def arriving(self) -> int:
        """The position of the job that runs while they are copied back."""
        return self.backward - 1

    def is_away(self, position: int) -> bool:
        """Whether the device holds nothing of them while a job runs."""
        return self.leaving < position < self.arriving

    def is_on_host(self, position: int) -> bool:
        """Whether the host holds a copy while a job runs."""
        return self.leaving <= position <= self.arriving


def offloads_of(row: Sequence[Job], stages: Collection[int]) -> tuple[Offload, ...]:
    """Return the offloads of a rank's jobs, by forward, for those of its stages that have any."""
    begun: dict[tuple[int, int], int] = {}
    found = []
    for position, job in enumerate(row):
        place = job.stage_index, job.microbatch_index
        if job.kind is JobKind.FORWARD:
            begun[place] = position
            continue
        if job.kind is JobKind.BACKWARD_WEIGHT or job.stage_index not in stages:
            continue
        if position - begun[place] >= _SHORTEST:
            stage, microbatch = place
            found.append(
                Offload(
                    stage_index=stage,
                    microbatch_index=microbatch,
                    forward=begun[place],
                    backward=position,
                )
            )
    return tuple(sorted(found, key=lambda offload: offload.forward))
