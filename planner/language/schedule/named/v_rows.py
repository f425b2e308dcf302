"""Rows of V-shaped tables, where pp rank r holds stages r and 2 * pp - 1 - r."""

from __future__ import annotations

from collections import Counter, deque

from planner.deadline import check_time
from planner.language.schedule.jobs import Job, JobKind


def v_warmup(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the forwards of both chunks that each rank runs before its first backward, at least.

    The first microbatch goes down the V and returns to rank r after 2 (pp - r) - 1 steps, in each
    of which the rank has another one to send down; r more follow while ranks behind turn round.
    """
    return tuple(
        min(num_microbatches, 2 * pp - rank - 1) + min(num_microbatches, rank + 1)
        for rank in range(pp)
    )


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
        self._next: Counter[tuple[JobKind, int]] = Counter()
        self._without_weight: deque[tuple[int, int]] = deque()

    def add(self, count: int, steps: str) -> None:
        """Add the steps, such as ``F0 I1 W1``, `count` times over."""
        # Chunk -1: whichever has the oldest gradient without its weight gradient.
        kinds = [(JobKind(step[0]), int(step[1:] or -1)) for step in steps.split()]
        for _ in range(count):
            check_time()
            for kind, chunk in kinds:
                self._add_one(kind, chunk)

    def _add_one(self, kind: JobKind, chunk: int) -> None:
        if kind is JobKind.BACKWARD_WEIGHT and chunk < 0:
            chunk, microbatch = self._without_weight.popleft()
        elif kind is JobKind.BACKWARD_WEIGHT:
            microbatch = next(m for c, m in self._without_weight if c == chunk)
            self._without_weight.remove((chunk, microbatch))
        else:
            # B and I are two ways to the same gradient and share a count.
            counted = JobKind.FORWARD if kind is JobKind.FORWARD else JobKind.FULL_BACKWARD
            microbatch = self._next[counted, chunk]
            self._next[counted, chunk] += 1
            if kind is JobKind.BACKWARD_INPUT:
                self._without_weight.append((chunk, microbatch))
        if microbatch < self._num_microbatches:
            self.jobs.append(
                Job(kind=kind, stage_index=self._stages[chunk], microbatch_index=microbatch)
            )
