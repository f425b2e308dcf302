"""Folded virtual stages: every second chunk runs back through the ranks in reverse.

Chunks meet on one rank, so a fold sends a boundary tensor less for each turn than a loop,
and the first and last stage (embedding and head, often tied) share rank 0 when vpp is even.
"""

from __future__ import annotations

import heapq

from planner.language.schedule.jobs import Job, forward, full_backward
from planner.language.schedule.placements import fold_placement
from planner.language.schedule.registry import register_schedule


def _limit_all(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (vpp * num_microbatches,) * pp


@register_schedule(
    "fold_all_in_all_out",
    summary="folded chunks; every microbatch through a chunk before the next chunk",
    placement=fold_placement,
    min_vpp=2,
    max_vpp=None,
    in_flight_limit=_limit_all,
)
def fold_all_in_all_out(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the breadth-first order on a fold: all forwards by chunk, then back the same way."""
    placed = fold_placement(pp, vpp)
    microbatches = range(num_microbatches)
    table: list[list[Job]] = [[] for _ in range(pp)]
    for stage, rank in enumerate(placed):
        table[rank] += [forward(stage, i) for i in microbatches]
    for stage in reversed(range(pp * vpp)):
        table[placed[stage]] += [full_backward(stage, i) for i in microbatches]
    return table


def _limit_oldest_first(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    # Found by simulating tables of up to 32 ranks, 8 chunks and 20 * pp microbatches; the bound
    # is reached at vpp=2.
    return (min(vpp * num_microbatches, vpp * (2 * pp - 1)),) * pp


@register_schedule(
    "fold_first_in_first_out",
    summary="folded chunks; a rank always serves the oldest microbatch it can",
    placement=fold_placement,
    min_vpp=2,
    max_vpp=None,
    in_flight_limit=_limit_oldest_first,
)
def fold_first_in_first_out(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the table of ranks that serve the oldest microbatch first, F or B alike.

    A new microbatch enters only where a rank would idle, so at most vpp * (2 * pp - 1) stages
    are live, less than twice what 1F1B needs, with no limit set. The order is found
    by playing it with B twice as long as F.
    """
    placed = fold_placement(pp, vpp)
    up = [(stage, placed[stage], forward, 1) for stage in range(pp * vpp)]
    down = [(stage, placed[stage], full_backward, 2) for stage in reversed(range(pp * vpp))]
    path = up + down
    table: list[list[Job]] = [[] for _ in range(pp)]
    waiting: list[list[int]] = [[] for _ in range(pp)]  # microbatches, a heap: oldest first
    waiting[0] = list(range(num_microbatches))
    step_of = [0] * num_microbatches
    idle = [True] * pp
    ends: list[tuple[int, int]] = []  # (time, microbatch) of jobs that run
    touched = {0}
    now = 0
    while True:
        # Only ranks that a job has freed or sent work to may start anything.
        for rank in sorted(touched):
            if idle[rank] and waiting[rank]:
                microbatch = heapq.heappop(waiting[rank])
                stage, _, job, duration = path[step_of[microbatch]]
                table[rank].append(job(stage, microbatch))
                idle[rank] = False
                heapq.heappush(ends, (now + duration, microbatch))
        if not ends:
            return table
        now, touched = ends[0][0], set()
        # All that ends now ends before any rank chooses: of all it has, a rank takes the oldest.
        while ends and ends[0][0] == now:
            _, microbatch = heapq.heappop(ends)
            step = step_of[microbatch]
            idle[path[step][1]] = True
            touched.add(path[step][1])
            step_of[microbatch] = step + 1
            if step + 1 < len(path):
                heapq.heappush(waiting[path[step + 1][1]], microbatch)
                touched.add(path[step + 1][1])
