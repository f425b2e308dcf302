"""Tables, measured: time to build and check large ones, and how good synthesised ones are.

Quality is over random uneven pipelines (2-4 ranks, up to 30 stages x microbatches): step time
of the best fixed table that fits over the synthesised one's, and of that over the optimum,
which CP-SAT proves. Needs no GPU; two minutes on two cores.
"""

from __future__ import annotations

import math
import random
import time
from typing import Annotated

from benchmarks.harness import Result, benchmark
from planner.language.schedule import build_schedule
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.synthesis.synthesize import Pipeline, synthesize_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.language.schedule.validate import validate_schedule
from tests.referees.schedules import solve_schedule_exactly


def large_tables(pp: int, num_microbatches: int) -> list[dict[str, object]]:
    """Build and check tables of every schedule, with up to 8 chunks."""
    rows: list[dict[str, object]] = []
    for name, spec in sorted(SCHEDULES.items()):
        vpp = 8 if spec.max_vpp is None else spec.max_vpp
        started = time.process_time()
        schedule = build_schedule(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
        built = time.process_time()
        validate_schedule(schedule)
        rows.append(
            {
                "schedule": name,
                "vpp": vpp,
                "jobs": sum(map(len, schedule.jobs)),
                "build_s": round(built - started, 3),
                "validate_s": round(time.process_time() - built, 3),
            }
        )
    return rows


def random_pipeline(rng: random.Random) -> Pipeline:
    """Uneven stages, some with transfers, some short of memory."""
    pp, vpp, m = rng.choice([2, 3, 4]), rng.choice([1, 1, 2]), rng.choice([4, 5, 6])
    if pp * vpp * m > 30:
        m = 4
    placed = rng.choice([loop_placement, fold_placement])(pp, vpp)
    forward_s = [rng.uniform(0.5, 2.0) for _ in placed]
    return Pipeline(
        stage_to_pp_rank=placed,
        num_microbatches=m,
        times=JobSeconds.of_stages(
            forward_s=tuple(forward_s),
            backward_input_s=tuple(f * rng.uniform(0.8, 1.3) for f in forward_s),
            backward_weight_s=tuple(f * rng.uniform(0.6, 1.1) for f in forward_s),
            transfer_s=rng.choice([0.0, 0.1, 0.5]),
        ),
        live_bytes=(1.0,) * len(placed),
        limit_bytes=(float(rng.choice([pp * vpp, pp * vpp + 1, 10**6])),) * pp,
    )


def best_fixed_s(pipeline: Pipeline) -> float:
    """Step time of the best fixed table of the same placement that fits; inf if none does."""
    pp, placed = pipeline.pp, pipeline.stage_to_pp_rank
    sizes = {"pp": pp, "vpp": len(placed) // pp, "num_microbatches": pipeline.num_microbatches}
    best = math.inf
    for name, spec in SCHEDULES.items():
        if spec.why_not(**sizes) is None and spec.placement(pp, sizes["vpp"]) == placed:
            schedule = build_schedule(name, **sizes)
            if pipeline.fits(schedule):
                best = min(best, simulate(schedule, pipeline.times, links="free").makespan_s)
    return best


def synthesis(num_cases: int) -> dict[str, float]:
    """Compare synthesised tables with fixed ones and with the proved optimum."""
    rng = random.Random(11)
    gains, gaps, seconds = [], [], []
    for _ in range(num_cases):
        pipeline = random_pipeline(rng)
        started = time.process_time()
        made = synthesize_schedule(pipeline)
        seconds.append(time.process_time() - started)
        fixed = best_fixed_s(pipeline)
        if fixed < math.inf:
            gains.append(fixed / made.step_s - 1)
        exact = solve_schedule_exactly(pipeline, time_limit_s=10)
        if exact.is_optimal:
            gaps.append(max(0.0, made.step_s / exact.step_s - 1))
    return {
        "cases": num_cases,
        "mean_gain_over_fixed": sum(gains) / len(gains),
        "proved": len(gaps),
        "optimal": sum(gap < 1e-4 for gap in gaps),
        "mean_gap_to_optimum": sum(gaps) / len(gaps),
        "largest_gap": max(gaps),
        "mean_synthesis_s": sum(seconds) / len(seconds),
    }


@benchmark("schedules", quick={"cases": 2, "ranks": 8, "microbatches": 32})
def schedules(
    *,
    cases: Annotated[int, "random pipelines"] = 60,
    ranks: Annotated[int, "of the large tables"] = 64,
    microbatches: Annotated[int, "of the large tables"] = 512,
) -> Result:
    notes = [f"{name} {value:.4g}" for name, value in synthesis(cases).items()]
    return Result(large_tables(ranks, microbatches), notes)
