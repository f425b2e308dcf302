"""Local search on a job table: move jobs that lie on the critical path.

The step ends when its longest chain of jobs does, and in that chain each job starts the
moment the one before it ends. Where neighbours of the chain are on one rank, only their
order there makes them wait, so only such blocks are worth changing (the argument of Nowicki
and Smutnicki for job shops): exchange the first or the last two jobs of a block, or move one
from inside to its front or its end. A W at the end of a block thus moves into the gap before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.job_table import JobTable, build_job_table
from planner.language.schedule.timing.simulate import Timeline, simulate_until_stuck

_NUM_SHAKES = 4
"""Random exchanges tried to leave a local optimum."""

_TEMPERATURE = 0.05
"""Part of the step time by which a move may at first make things worse; falls to 0."""


def improve_schedule(
    schedule: Schedule,
    times: JobSeconds,
    *,
    fits: Callable[[Sequence[Job]], bool],
    max_evaluations: int,
    target_s: float = 0.0,
    seed: int = 0,
) -> Schedule:
    """Return the best table found from `schedule` within so many simulations.

    `fits` says whether a rank may run a row (its memory). Stops early at `target_s`, a lower
    bound. Deterministic for a seed.
    """
    rng = random.Random(seed)
    current = best = build_job_table(schedule)
    timeline = _simulated(current, times)
    current_cost = best_cost = _cost(timeline)
    num_left = max_evaluations
    while num_left > 0 and best_cost[0] > target_s * (1 + 1e-9):
        moves = list(_moves(current.schedule, _critical_path(timeline)))
        rng.shuffle(moves)
        moved = False
        for rank, source, target in moves:
            if num_left <= 0:
                break
            row = list(current.schedule.jobs[rank])
            row.insert(target, row.pop(source))
            if not fits(row):
                continue
            changed = current.with_row(rank, row)
            changed_timeline = _simulated(changed, times)
            num_left -= 1
            # The order within a rank is kept, but ranks may now wait for each other.
            if changed_timeline.stuck:
                continue
            cost = _cost(changed_timeline)
            # Simulated annealing: a worse table is taken within a temperature that falls to 0, so
            # the search crosses ridges early and only descends late.
            worst = _TEMPERATURE * best_cost[0] * (num_left / max_evaluations) * rng.random()
            if cost < current_cost or cost[0] <= current_cost[0] + worst:
                current, timeline, current_cost, moved = changed, changed_timeline, cost, True
                if cost < best_cost:
                    best, best_cost = changed, cost
                break
        if not moved:  # a local optimum: go on from a table some random moves away from the best
            current, timeline = _shaken(best, times, fits, rng)
            current_cost = _cost(timeline)
            num_left -= 1
    return best.schedule


def _simulated(table: JobTable, times: JobSeconds) -> Timeline:
    return simulate_until_stuck(table, times, links="free")


def _shaken(
    table: JobTable,
    times: JobSeconds,
    fits: Callable[[Sequence[Job]], bool],
    rng: random.Random,
) -> tuple[JobTable, Timeline]:
    """Return a valid table a few exchanges of neighbours away, and its simulation."""
    timeline = _simulated(table, times)
    for _ in range(_NUM_SHAKES):
        rank = rng.randrange(table.schedule.pp)
        row = list(table.schedule.jobs[rank])
        position = rng.randrange(1, max(len(row), 2))
        if position >= len(row) or not _keeps_order(row, position, position - 1):
            continue
        row.insert(position - 1, row.pop(position))
        changed = table.with_row(rank, row)
        changed_timeline = _simulated(changed, times)
        if fits(row) and not changed_timeline.stuck:
            table, timeline = changed, changed_timeline
    return table, timeline


def _cost(timeline: Timeline) -> tuple[float, float]:
    """Step time, then the sum of the ranks' ends, which tells tables of one step time apart."""
    return timeline.makespan_s, sum(timeline.rank_end_s)


def _critical_path(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (pp_rank, position) of a longest chain of jobs, first to last."""
    schedule, starts, ends = timeline.schedule, timeline.start_s, timeline.end_s
    at: dict[tuple[str, int, int], tuple[int, int]] = {}
    for rank, row in enumerate(schedule.jobs):
        for position, job in enumerate(row):
            result = (
                "G" if job.kind in (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT) else job.kind
            )
            at[str(result), job.stage_index, job.microbatch_index] = (rank, position)
    rank = max(range(schedule.pp), key=timeline.rank_end_s.__getitem__)
    position = len(ends[rank]) - 1
    path = [(rank, position)]
    while starts[rank][position] > 0:
        # (Equal to the bit: a job's start is the very number that its cause ended at.)
        if position and ends[rank][position - 1] == starts[rank][position]:
            position -= 1
        else:  # its start was set by what came from another rank
            job = schedule.jobs[rank][position]
            if job.kind is JobKind.FORWARD:
                rank, position = at["F", job.stage_index - 1, job.microbatch_index]
            else:
                rank, position = at["G", job.stage_index + 1, job.microbatch_index]
        path.append((rank, position))
    path.reverse()
    return path


def _moves(schedule: Schedule, path: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (pp_rank, source, target) for every move worth trying, from blocks of the path."""
    first = 0
    seen = set()
    for end in range(1, len(path) + 1):
        if end < len(path) and path[end][0] == path[first][0]:
            continue
        # A block: the jobs of the path that are next to each other on one rank.
        rank, start, stop = path[first][0], path[first][1], path[end - 1][1]
        row = schedule.jobs[rank]
        for position in range(start, stop + 1):
            for source, target in ((position, start), (position, stop), (position, position - 1)):
                if source != target >= start and (rank, source, target) not in seen:
                    seen.add((rank, source, target))
                    if _keeps_order(row, source, target):
                        yield rank, source, target
        first = end


def _keeps_order(row: Sequence[Job], source: int, target: int) -> bool:
    """Whether the move passes no job that must stay on its side of the moved one."""
    moved = row[source]
    passed = row[target:source] if target < source else row[source + 1 : target + 1]
    # Jobs of a kind on a stage stay in the order of microbatches, which are alike; jobs of one
    # microbatch on a stage depend on each other.
    return all(
        (job.kind, job.stage_index) != (moved.kind, moved.stage_index)
        and (job.stage_index, job.microbatch_index) != (moved.stage_index, moved.microbatch_index)
        for job in passed
    )
