"""Random valid tables for tests."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.language.schedule import Job, JobKind, Schedule
from planner.language.schedule.placements import fold_placement, loop_placement


def random_table(
    rng: random.Random,
    *,
    pp: int | None = None,
    vpp: int | None = None,
    num_microbatches: int | None = None,
) -> Schedule:
    """A valid table: jobs taken in a random order in which each has its inputs."""
    pp, vpp = pp or rng.randint(1, 5), vpp or rng.randint(1, 3)
    m = num_microbatches or rng.randint(1, 6)
    placed = list(rng.choice([loop_placement, fold_placement])(pp, vpp))
    if rng.random() < 0.3:
        rng.shuffle(placed)
    num_stages = pp * vpp
    split = {(s, i): rng.random() < 0.5 for s in range(num_stages) for i in range(m)}
    ready = [Job(kind=JobKind.FORWARD, stage_index=0, microbatch_index=i) for i in range(m)]
    rows: list[list[Job]] = [[] for _ in range(pp)]
    while ready:
        job = ready.pop(rng.randrange(len(ready)))
        rows[placed[job.stage_index]].append(job)
        stage, i = job.stage_index, job.microbatch_index

        def gradient(s: int, i: int = i) -> Job:
            kind = JobKind.BACKWARD_INPUT if split[s, i] else JobKind.FULL_BACKWARD
            return Job(kind=kind, stage_index=s, microbatch_index=i)

        if job.kind is JobKind.FORWARD:
            last = stage + 1 == num_stages
            ready.append(gradient(stage) if last else replace(job, stage_index=stage + 1))
        elif job.kind is not JobKind.BACKWARD_WEIGHT:
            if stage:
                ready.append(gradient(stage - 1))
            if job.kind is JobKind.BACKWARD_INPUT:
                ready.append(replace(job, kind=JobKind.BACKWARD_WEIGHT))
    return Schedule(
        name="random",
        stage_to_pp_rank=tuple(placed),
        num_microbatches=m,
        jobs=tuple(map(tuple, rows)),
    )
