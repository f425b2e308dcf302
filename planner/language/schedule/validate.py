"""Proof that a table is safe to run, before anything does: `validate_schedule`.

Rules, in the order checked:

1. every pp rank holds a stage and every stage has a rank;
2. a job is on the rank of its stage, and its stage and microbatch exist;
3. every stage and microbatch has one F, and one B or else one I and one W;
4. the ranks, each running its own row in order, all reach the end.

Rule 4 covers dependencies and deadlock alike: the table is simulated with unit times, and a
rank stops where the input of its next job never comes. When it ends, sorting all
transfers by when their producer ended gives one order for every rank's sends and receives
that can't deadlock either, even where each rank does them one by one and blocks on each
(`communication_order` derives it and says why).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

from planner.errors import ScheduleError
from planner.language.schedule.draw import draw_table
from planner.language.schedule.jobs import JobKind, Schedule
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.in_flight import in_flight, in_flight_profile
from planner.language.schedule.timing.simulate import Timeline, simulate_until_stuck

_GRADIENT_KINDS = (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT)


def validate_schedule(schedule: Schedule, *, in_flight_limit: Sequence[int] | None = None) -> None:
    """Raise ScheduleError, with the table and the faulty cell marked, unless all rules hold.

    `in_flight_limit` bounds the live microbatch-stages of each pp rank (see `in_flight`). It
    defaults to what the registered schedule of this name promises, if it promises any.
    """
    _check_placement(schedule)
    _check_each_job_once(schedule)
    _check_it_ends(schedule)
    if in_flight_limit is None and schedule.name in SCHEDULES:
        spec = SCHEDULES[schedule.name]
        if spec.in_flight_limit is not None and schedule.num_stages % schedule.pp == 0:
            vpp = schedule.num_stages // schedule.pp
            in_flight_limit = spec.in_flight_limit(schedule.pp, vpp, schedule.num_microbatches)
    if in_flight_limit is not None:
        _check_in_flight(schedule, in_flight_limit)


def _fail(schedule: Schedule, message: str, marked: Collection[tuple[int, int]] = ()) -> NoReturn:
    picture = draw_table(schedule.jobs, marked=marked)
    raise ScheduleError(f"schedule {schedule.name!r}: {message}\n{picture}")


def _check_placement(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        _fail(schedule, f"num_microbatches={schedule.num_microbatches} must be at least 1")
    held = set(schedule.stage_to_pp_rank)
    for stage, rank in enumerate(schedule.stage_to_pp_rank):
        if not 0 <= rank < schedule.pp:
            _fail(schedule, f"stage {stage} is placed on pp rank {rank} of {schedule.pp}")
    for rank in range(schedule.pp):
        if rank not in held:
            _fail(
                schedule,
                f"pp rank {rank} holds no stage; place one there or use pp={len(held)}",
                [(rank, 0)],
            )


def _check_each_job_once(schedule: Schedule) -> None:
    for rank in range(schedule.pp):
        if not _has_each_job_once(schedule, rank):
            _explain_wrong_jobs(schedule)
            raise AssertionError(f"pp rank {rank} breaks a rule that has no explanation")


def _has_each_job_once(schedule: Schedule, pp_rank: int) -> bool:
    """Whether rules 2 and 3 hold for a rank, without saying why not; fast, for large tables."""
    num_microbatches = schedule.num_microbatches
    row = schedule.jobs[pp_rank]
    if any(not 0 <= job.microbatch_index < num_microbatches for job in row):
        return False
    cells: dict[JobKind, list[int]] = {kind: [] for kind in JobKind}
    for job in row:
        cells[job.kind].append(job.stage_index * num_microbatches + job.microbatch_index)
    wanted = [
        cell
        for stage in schedule.stages_of(pp_rank)
        for cell in range(stage * num_microbatches, (stage + 1) * num_microbatches)
    ]
    gradients = cells[JobKind.FULL_BACKWARD] + cells[JobKind.BACKWARD_INPUT]
    # Equal as sorted lists: no job is missing, repeated or on another stage's rank.
    return (
        sorted(cells[JobKind.FORWARD]) == wanted
        and sorted(gradients) == wanted
        and sorted(cells[JobKind.BACKWARD_WEIGHT]) == sorted(cells[JobKind.BACKWARD_INPUT])
    )


def _explain_wrong_jobs(schedule: Schedule) -> None:
    # Only for tables that are known to be wrong: cell by cell, to name and mark the first.
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    placed = schedule.stage_to_pp_rank
    # Where each result is made: F, gradient (B or I) and W, by stage * microbatches + microbatch.
    size = num_stages * num_microbatches
    made: dict[JobKind, list[tuple[int, int] | None]] = {
        kind: [None] * size for kind in (JobKind.FORWARD, JobKind.BACKWARD_WEIGHT)
    }
    # B and I share a list: either makes the gradient, and only one of them may.
    made |= dict.fromkeys(_GRADIENT_KINDS, [None] * size)
    for rank, row in enumerate(schedule.jobs):
        for position, job in enumerate(row):
            stage, microbatch, here = job.stage_index, job.microbatch_index, (rank, position)
            if not 0 <= stage < num_stages:
                _fail(
                    schedule, f"{job} is of stage {stage}, stages are 0..{num_stages - 1}", [here]
                )
            if not 0 <= microbatch < num_microbatches:
                _fail(
                    schedule,
                    f"{job} is of microbatch {microbatch}, "
                    f"microbatches are 0..{num_microbatches - 1}",
                    [here],
                )
            if placed[stage] != rank:
                _fail(
                    schedule,
                    f"{job} is on pp rank {rank}, but stage {stage} is on pp rank {placed[stage]}",
                    [here],
                )
            results, index = made[job.kind], stage * num_microbatches + microbatch
            first = results[index]
            if first is not None:
                _fail(
                    schedule,
                    f"{job} computes again what {schedule.jobs[first[0]][first[1]]} at position "
                    f"{first[1]} did; each result is computed once",
                    [first, here],
                )
            results[index] = here
    for index in range(size):
        _check_complete(schedule, made, *divmod(index, num_microbatches))


def _check_complete(
    schedule: Schedule,
    made: dict[JobKind, list[tuple[int, int] | None]],
    stage: int,
    microbatch: int,
) -> None:
    """Check that this stage and microbatch has F, and B or both I and W."""
    index = stage * schedule.num_microbatches + microbatch
    rank = schedule.stage_to_pp_rank[stage]
    end = (rank, len(schedule.jobs[rank]))
    what = f"of stage {stage}, microbatch {microbatch}"
    if made[JobKind.FORWARD][index] is None:
        _fail(schedule, f"no F {what} on pp rank {rank}", [end])
    gradient = made[JobKind.FULL_BACKWARD][index]
    weight = made[JobKind.BACKWARD_WEIGHT][index]
    if gradient is None:
        _fail(schedule, f"no B or I {what} on pp rank {rank}", [end])
        return
    kind = schedule.jobs[gradient[0]][gradient[1]].kind
    if kind is JobKind.BACKWARD_INPUT and weight is None:
        _fail(schedule, f"I without W {what}; I leaves the weight gradient to a W", [gradient])
    if kind is JobKind.FULL_BACKWARD and weight is not None:
        _fail(schedule, f"W beside B {what}; B computes the weight gradient itself", [weight])


def _check_it_ends(schedule: Schedule) -> None:
    # Whether a table ends depends on the order of jobs alone, not on how long they take.
    reached = simulate_until_stuck(schedule)
    if not reached.stuck:
        return
    marked = [(rank, len(reached.start_s[rank])) for rank in reached.stuck]
    chain, closed = _waiting_chain(schedule, reached, marked[0][0])
    waits = []
    for rank in chain:
        job = schedule.jobs[rank][len(reached.start_s[rank])]
        result, stage, microbatch = reached.stuck[rank]
        owner = schedule.stage_to_pp_rank[stage]
        need = "forward" if result == "F" else "gradient"
        waits.append(
            f"{job} on pp rank {rank} needs the {need} of stage {stage}, "
            f"microbatch {microbatch}, which pp rank {owner} has further on"
        )
    kind = "order within a rank breaks a dependency" if len(chain) == 1 else "deadlock"
    _fail(schedule, f"{kind}: " + "; ".join(waits), closed or marked)


def _waiting_chain(
    schedule: Schedule, reached: Timeline, rank: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Follow who waits for whom from a stuck rank; return the ranks of the ring and its cells.

    Every stuck rank waits for a job of a stuck rank, for results have one place and ranks
    that ended made all theirs; so following the waits must come round.
    """
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = schedule.stage_to_pp_rank[reached.stuck[rank].stage_index]
    ring = seen[seen.index(rank) :]
    return ring, [(r, len(reached.start_s[r])) for r in ring]


def _check_in_flight(schedule: Schedule, limit: Sequence[int]) -> None:
    if len(limit) != schedule.pp:
        raise ScheduleError(
            f"in_flight_limit has {len(limit)} entries for pp={schedule.pp}; give one for each rank"
        )
    for rank, peak in enumerate(in_flight(schedule)):
        if peak > limit[rank]:
            profile = in_flight_profile(schedule, rank)
            position = next(p for p, live in enumerate(profile) if live > limit[rank])
            _fail(
                schedule,
                f"pp rank {rank} has {peak} microbatch-stages in flight, limit {limit[rank]}; "
                f"{schedule.jobs[rank][position]} is the first over it",
                [(rank, position)],
            )
