"""The best job table of a small pipeline, exactly, by CP-SAT: the referee of the synthesis.

Letters: s a stage, i a microbatch, k a job kind (F; I and W, or B), r a pp rank.

Variables     start[k, s, i] >= 0, whole time steps; end = start + the job's time
Minimise      the last end of any job
Subject to
    end[F, s-1, i] + transfer <= start[F, s, i]
    end[F, s, i] <= start[G, s, i]                                 G is I, or B
    end[G, s+1, i] + transfer <= start[G, s, i]
    end[I, s, i] <= start[W, s, i]
    jobs of one rank do not overlap
    on a rank, the sum of live_bytes over microbatches between the start of F and the end of
    their last job never exceeds limit_bytes
    end[k, s, i] <= start[k, s, i+1]                               microbatches in order

The last loses nothing: microbatches are alike, so the k-th job of a kind on a stage may be
given to microbatch k. Times are rounded to 1/20,000 of a bound on the step, and the step time
of the table found is evaluated with the true times; so "optimal" holds to that rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.language.schedule import Job, JobKind, Schedule
from planner.language.schedule.synthesis.synthesize import Pipeline, synthesize_schedule
from planner.language.schedule.timing.simulate import simulate

_STEPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSchedule:
    """A table, its step time, and what the solver proved no table can beat."""

    schedule: Schedule
    step_s: float
    lower_bound_s: float
    is_optimal: bool


def solve_schedule_exactly(
    pipeline: Pipeline, *, split_backward: bool = True, time_limit_s: float = 30.0
) -> ExactSchedule:
    """Return the best table with I and W jobs (or with B jobs), proved if time allows.

    Up to about 150 jobs are usually proved in seconds. The synthesised table is the hint, so
    the result is never slower than it.
    """
    from ortools.sat.python import cp_model

    hint = synthesize_schedule(pipeline, split_backward=split_backward)
    if hint.step_s <= hint.lower_bound_s * (1 + 1e-9):
        return ExactSchedule(
            schedule=hint.schedule,
            step_s=hint.step_s,
            lower_bound_s=hint.lower_bound_s,
            is_optimal=True,
        )
    step_s = hint.step_s / _STEPS
    horizon = 2 * _STEPS
    model = cp_model.CpModel()
    kinds: tuple[JobKind, ...] = (JobKind.FORWARD, JobKind.FULL_BACKWARD)
    if split_backward:
        kinds = (JobKind.FORWARD, JobKind.BACKWARD_INPUT, JobKind.BACKWARD_WEIGHT)
    gradient, last = kinds[1], kinds[-1]
    seconds = pipeline.times.by_kind()
    into, back = (
        [round(way_s / step_s) for way_s in of_stages]
        for of_stages in pipeline.times.between_ranks(pipeline.stage_to_pp_rank)
    )
    num_stages, num_microbatches = len(pipeline.stage_to_pp_rank), pipeline.num_microbatches
    hint_start = _job_starts(hint.schedule, pipeline, split_backward=split_backward)

    start: dict[tuple[JobKind, int, int], Any] = {}
    end: dict[tuple[JobKind, int, int], Any] = {}
    busy: list[list[Any]] = [[] for _ in range(pipeline.pp)]
    live: list[list[tuple[Any, int]]] = [[] for _ in range(pipeline.pp)]
    makespan = model.new_int_var(0, horizon, "makespan")
    for s in range(num_stages):
        rank = pipeline.stage_to_pp_rank[s]
        for i in range(num_microbatches):
            for k in kinds:
                duration = round(seconds[k][s] / step_s)
                key = (k, s, i)
                start[key] = model.new_int_var(0, horizon - duration, f"{s}{k}{i}")
                end[key] = start[key] + duration
                busy[rank].append(
                    model.new_fixed_size_interval_var(start[key], duration, f"run {s}{k}{i}")
                )
                model.add(end[key] <= makespan)
                model.add_hint(start[key], round(hint_start[key] / step_s))
                if i:
                    model.add(end[k, s, i - 1] <= start[key])
            length = model.new_int_var(0, horizon, "")
            first, final = start[kinds[0], s, i], end[last, s, i]
            live[rank].append((model.new_interval_var(first, length, final, f"live {s},{i}"), s))
    for s in range(num_stages):
        for i in range(num_microbatches):
            model.add(end[kinds[0], s, i] <= start[gradient, s, i])
            if last is not gradient:
                model.add(end[gradient, s, i] <= start[last, s, i])
            if s:
                model.add(end[kinds[0], s - 1, i] + into[s] <= start[kinds[0], s, i])
                model.add(end[gradient, s, i] + back[s - 1] <= start[gradient, s - 1, i])
    for rank in range(pipeline.pp):
        model.add_no_overlap(busy[rank])
        _limit_memory(model, pipeline, rank, live[rank])
    model.minimize(makespan)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    found = hint.schedule
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        starts = {key: solver.value(variable) for key, variable in start.items()}
        solved = _table(pipeline, starts, name=hint.schedule.name)
        if simulate(solved, pipeline.times, links="free").makespan_s < hint.step_s:
            found = solved
    # Each rounding may shorten a job or a transfer on the longest chain by half a step.
    slack = (3 * num_stages * num_microbatches + 2 * num_stages) / 2
    proved = (solver.best_objective_bound - slack) * step_s
    return ExactSchedule(
        schedule=found,
        step_s=simulate(found, pipeline.times, links="free").makespan_s,
        lower_bound_s=max(proved, hint.lower_bound_s),
        is_optimal=status == cp_model.OPTIMAL,
    )


def _limit_memory(model: Any, pipeline: Pipeline, rank: int, live: list[tuple[Any, int]]) -> None:
    """Bound what is live on a rank; sizes are rounded so that nothing over the limit passes."""
    total = sum(pipeline.live_bytes[s] for _, s in live)
    if total <= pipeline.limit_bytes[rank]:
        return
    unit = pipeline.limit_bytes[rank] / 10**9
    demands = [round(pipeline.live_bytes[s] / unit) for _, s in live]
    # Half a unit of rounding for each entry: exact for sizes that differ by more than 1e-6.
    model.add_cumulative([interval for interval, _ in live], demands, 10**9 + len(live))


def _job_starts(
    schedule: Schedule, pipeline: Pipeline, *, split_backward: bool
) -> dict[tuple[JobKind, int, int], float]:
    """Return when each job starts; with `split_backward`, a B counts as I and W in a row."""
    starts = {}
    for _, job, start, _ in simulate(schedule, pipeline.times, links="free"):
        s, i = job.stage_index, job.microbatch_index
        if split_backward and job.kind is JobKind.FULL_BACKWARD:
            starts[JobKind.BACKWARD_INPUT, s, i] = start
            starts[JobKind.BACKWARD_WEIGHT, s, i] = start + pipeline.times.backward_input_s[s]
        else:
            starts[job.kind, s, i] = start
    return starts


def _table(
    pipeline: Pipeline, starts: dict[tuple[JobKind, int, int], int], *, name: str
) -> Schedule:
    """Return the jobs of each rank by start; ties (jobs of no time) in the order F, G, W."""
    order = {kind: number for number, kind in enumerate(JobKind)}
    rows: list[list[Job]] = [[] for _ in range(pipeline.pp)]
    for k, s, i in sorted(starts, key=lambda key: (starts[key], order[key[0]], key[1:])):
        rows[pipeline.stage_to_pp_rank[s]].append(Job(kind=k, stage_index=s, microbatch_index=i))
    return Schedule(
        name=name,
        stage_to_pp_rank=pipeline.stage_to_pp_rank,
        num_microbatches=pipeline.num_microbatches,
        jobs=tuple(map(tuple, rows)),
    )
