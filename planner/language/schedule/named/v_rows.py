"""Rows of V-shaped tables, where pp rank r holds stages r and 2 * pp - 1 - r."""

from __future__ import annotations

from collections import deque

from planner.deadline import check_time
from planner.language.schedule.jobs import Job, JobKind


def v_warmup(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the forwards of each stage that its rank runs before its first backward, at least.

    The first microbatch goes down the V and returns to rank r after 2 (pp - r) - 1 steps, in each
    of which the rank has another one to send down; r more follow while ranks behind turn round.
    """
    down = [min(num_microbatches, 2 * pp - rank - 1) for rank in range(pp)]
    up = [min(num_microbatches, rank + 1) for rank in range(pp)]
    return (*down, *reversed(up))


class VRow:
    """The jobs of one rank, written step by step; mutable while it is built.

    A step names kind and chunk, ``F0`` or ``B1``, and stands for the next microbatch that
    has not had it; ``W`` alone is the weight gradient of the oldest I job still without one.
    Microbatches from `num_microbatches` on are left out, so a table may be written for more:
    no job depends on another microbatch, so what stays is as valid as the whole.
    """

    def __init__(self, *, pp: int, pp_rank: int, num_microbatches: int) -> None:
        self.jobs: list[Job] = []
        self._stages = (pp_rank, 2 * pp - 1 - pp_rank)
        self._num_microbatches = num_microbatches
        self._forwards, self._gradients = [0, 0], [0, 0]
        """The next microbatch of each chunk; B and I are two ways to the same gradient."""
        self._without_weight: tuple[deque[tuple[int, int]], ...] = (deque(), deque())
        """By chunk, (number of the gradient, microbatch) of I jobs without their W job."""

    def add(self, count: int, steps: str) -> None:
        """Add the steps, such as ``F0 I1 W1``, `count` times over."""
        # Chunk -1: whichever has the oldest gradient without its weight gradient.
        kinds = [(JobKind(step[0]), int(step[1:] or -1)) for step in steps.split()]
        for _ in range(count):
            check_time()
            for kind, chunk in kinds:
                self._add_one(kind, chunk)

    def _add_one(self, kind: JobKind, chunk: int) -> None:
        if kind is _FORWARD:
            microbatch = self._forwards[chunk]
            self._forwards[chunk] += 1
        elif kind is _WEIGHT:
            waiting = self._without_weight
            if chunk < 0:
                chunk = min((of[0][0], at) for at, of in enumerate(waiting) if of)[1]
            microbatch = waiting[chunk].popleft()[1]
        else:
            microbatch = self._gradients[chunk]
            if kind is _INPUT:
                self._without_weight[chunk].append((sum(self._gradients), microbatch))
            self._gradients[chunk] += 1
        if microbatch < self._num_microbatches:
            self.jobs.append(
                Job(kind=kind, stage_index=self._stages[chunk], microbatch_index=microbatch)
            )


# Looked up once: tables of long pipelines have a million jobs.
_FORWARD, _INPUT, _WEIGHT = JobKind.FORWARD, JobKind.BACKWARD_INPUT, JobKind.BACKWARD_WEIGHT
