"""A plan's own job table instead of a named one, where that is faster.

The chain DP balances stages as far as blocks allow; what stays uneven, and what transfers
cost, a named schedule does not know. `planner.language.schedule.synthesize_schedule` makes a table
for the plan's very stages under the memory the plan has left, and the cost model's estimate
decides, as it does for every plan.
"""

from __future__ import annotations

from costmodel import CostCache, Estimate, estimate
from costmodel.estimate import plan_job_seconds, plan_kept_bytes
from costmodel.memory.parts import MemoryParts
from planner.language.plan import Plan
from planner.language.schedule.synthesis.synthesize import Pipeline, synthesize_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from profiles import Profile
from search.candidates import with_estimate

SYNTHESISED = "synthesised"
"""The schedule name of a plan that brings its own table."""

_MOST_JOBS = 30_000
"""Larger tables stay as they are: a better one takes many seconds and fills the plan file."""

_LEAST_GAIN = 0.005
"""Part of the step time a table must save to be worth more than a name."""


def with_synthesised_table(
    plan: Plan, answer: Estimate, *, costs: CostCache, memory_limit_bytes: float
) -> tuple[Plan, Estimate] | None:
    """Return the plan with its own table and that one's estimate, or None if none is faster.

    Stages, layouts and degrees stay; the table may split backwards. `answer` is the
    estimate of `plan`, which must fit `memory_limit_bytes` on each device.
    """
    # F, I and W of each stage and microbatch.
    num_jobs = 3 * len(plan.stages) * plan.num_microbatches
    if plan.pp == 1 or num_jobs > _MOST_JOBS:
        return None
    live_bytes = plan_kept_bytes(plan, costs)
    limit_bytes = tuple(
        _live_limit(parts, memory_limit_bytes, costs.profile) for parts in answer.memory
    )
    # Any table needs room for a microbatch on all stages of a rank.
    one_microbatch = [0.0] * plan.pp
    for stage, size in zip(plan.stages, live_bytes, strict=True):
        one_microbatch[stage.pp_rank] += size
    if any(limit < needed for limit, needed in zip(limit_bytes, one_microbatch, strict=True)):
        return None
    made = synthesize_schedule(
        Pipeline(
            stage_to_pp_rank=plan.stage_to_pp_rank,
            num_microbatches=plan.num_microbatches,
            times=_alike_both_ways(plan_job_seconds(plan, costs)),
            live_bytes=live_bytes,
            limit_bytes=limit_bytes,
        ),
        name=SYNTHESISED,
    )
    changed = plan.model_copy(
        update={"schedule": SYNTHESISED, "table": tuple(made.schedule.to_json()["jobs"])}
    )
    new_answer = estimate(costs.graph, costs.profile, changed, costs=costs)
    if new_answer.peak_bytes > memory_limit_bytes or new_answer.step_s > answer.step_s * (
        1 - _LEAST_GAIN
    ):
        return None
    return with_estimate(changed, new_answer), new_answer


def _live_limit(parts: MemoryParts, memory_limit_bytes: float, profile: Profile) -> float:
    """Bytes a rank has for live microbatches: what it uses for them, and what is free."""
    free = memory_limit_bytes - float(parts.total)
    overhead = 1.0 + profile.allocator_overhead_fraction
    # Live bytes grow by the allocator's part, so free bytes hold so much less of them.
    return float(parts.activation_bytes) + max(0.0, free / overhead)


def _alike_both_ways(seconds: JobSeconds) -> JobSeconds:
    """The cost model's times; a boundary takes the slower of its two directions."""
    into_s, back_s = seconds.receive_forward_s, seconds.receive_backward_s
    return JobSeconds.of_stages(
        forward_s=seconds.forward_s,
        backward_input_s=seconds.backward_input_s,
        backward_weight_s=seconds.backward_weight_s,
        transfer_s=tuple(map(max, into_s[1:], back_s[:-1])),
    )
