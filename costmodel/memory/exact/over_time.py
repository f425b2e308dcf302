"""Memory over a step: what each pp rank holds during each of its jobs, by part.

The same walk as `plan_memory`, of which a plan's memory is the fullest moment, laid on the times
at which the jobs run. Between two jobs a rank holds what the job before left, which is less than
either job's height; pictures may draw each job's height until the next job starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.cache import CostCache
from costmodel.memory.exact.plan_memory import walk_plan
from costmodel.memory.parts import MemoryParts
from costmodel.time.plan_price import PlanPrice
from planner.language.schedule.step_jobs import StepJobKind, step_jobs
from planner.language.schedule.timing.simulate import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """A rank's memory at the height of one job."""

    start_s: float
    """When the job starts, from the step's start."""
    end_s: float
    """When it ends."""
    job: str
    """The job, as the table spells it; O is the optimizer."""
    parts: MemoryParts
    """Bytes."""


def memory_over_time(
    price: PlanPrice, costs: CostCache, timeline: Timeline
) -> tuple[tuple[MemoryMoment, ...], ...]:
    """Return the moments of each pp rank, in order; the fullest has the plan's memory.

    `price` is that of a plan's replicas (`costmodel.estimate.slowest_price`), `timeline` an
    estimate's of the plan.
    """
    found = []
    plan, schedule = price.plan, timeline.schedule
    weights = price.weights(range(plan.pp))
    for pp_rank, walked in enumerate(walk_plan(plan, costs, schedule, weights)):
        starts, ends = timeline.start_s[pp_rank], timeline.end_s[pp_rank]
        moments = [
            MemoryMoment(
                start_s=float(start_s),
                end_s=float(end_s),
                job=str(sample.job),
                parts=walked.parts(sample, on_host=sample.host_bytes),
            )
            for sample, start_s, end_s in zip(walked.samples, starts, ends, strict=True)
        ]
        once = timeline.step_jobs_s[pp_rank] if timeline.step_jobs_s else ()
        moments += [
            MemoryMoment(
                start_s=float(start_s),
                end_s=float(end_s),
                job=str(job),
                parts=walked.update_parts(),
            )
            for job, (start_s, end_s) in zip(step_jobs(pp_rank), once, strict=bool(once))
            if job.kind is StepJobKind.OPTIMIZER
        ]
        found.append(tuple(moments))
    return tuple(found)
