"""What a recorded run says about a profile: each recorded time beside its prediction, in terms.

The prediction is `estimate`'s own. By how much it grows with a term's factor is found by pricing
the plan once more with that factor a tenth larger: no part of the cost model is written twice, and
a part that is hidden behind another has no share. `profiles.calibration` solves for the factors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from costmodel.cache import CostCache
from costmodel.compare import (
    JobsAlike,
    as_rank_timelines,
    compare_run,
    first_steady_step,
    job_seconds,
    step_seconds,
)
from costmodel.estimate import estimate
from costmodel.execution.dispatch.imbalance import Imbalance
from costmodel.execution.dispatch.recorded import recorded_imbalance
from costmodel.execution.executed import in_training
from costmodel.time.plan_price import price_plan, stages_of_rank
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.timeline import OPTIMIZER, RankTimeline
from profiles import Profile
from profiles.calibration import add_run
from profiles.medians import median_and_error
from profiles.records import Calibration, CalibrationRun, Factor, Observation

_MORE = 0.1
"""By which a factor is raised to see what depends on it."""

STEP = "step"
_LEAST_SHARE = 0.002
"""Of a step: what is shorter is timed no better than the clock and the scheduler allow."""


def calibrated(
    profile: Profile, graph: ModelGraph, plan: Plan, measured: Sequence[RankTimeline]
) -> Profile:
    """Return a profile that has learned from a recorded run of a plan.

    Raises PlannerError when the recording is not of this plan.
    """
    run = observe(profile, graph, plan, measured)
    found = add_run(profile.file.calibration, run)
    file = profile.file.model_copy(update={"calibration": found})
    return Profile(file, profile.ops, profile.collectives)


def observe(
    profile: Profile, graph: ModelGraph, plan: Plan, measured: Sequence[RankTimeline]
) -> CalibrationRun:
    """Return what a run took beside what the profile without factors predicts."""
    # Always from the profile without factors, so a second run corrects them and does not multiply.
    plain = _with_factors(profile, {})
    first = first_steady_step(measured)
    # What the run's routers did is no error of the profile.
    sigma = recorded_imbalance(plan, measured, first_step=first)
    predicted = _predict(plain, graph, plan, sigma)
    answer = estimate(graph, plain, plan)
    compare_run(answer.timeline, answer.step_s, measured)  # raises for another plan's run
    found = _measure(measured, first)
    grown = {
        # The plan is priced again for each term, so what another part hides has no share.
        term: _predict(_with_factors(profile, {term: 1.0 + _MORE}), graph, plan, sigma)
        for term in sorted(plain.factors.asked)
    }
    least_s = _LEAST_SHARE * predicted[STEP]
    observations = []
    for what, predicted_s in predicted.items():
        if what not in found or predicted_s < least_s:
            continue
        measured_s, error = found[what]
        # d predicted / d factor, by a forward difference: seconds for each unit of the factor.
        parts = {term: (told[what] - predicted_s) / _MORE for term, told in grown.items()}
        observations.append(
            Observation(
                what=what,
                measured_s=measured_s,
                standard_error=error,
                predicted_s=predicted_s,
                parts_s={term: part for term, part in parts.items() if part > 1e-6 * predicted_s},
            )
        )
    steps = {span.step for line in measured for span in line.spans if span.step >= first}
    decisions = plan.model_copy(update={"estimate": {}}).model_dump_json()
    return CalibrationRun(
        plan=_digest(decisions),
        model=plan.model.name,
        num_steps=len(steps),
        recording=_digest(repr([asdict(line) for line in measured])),
        expert_imbalance=sigma,
        observations=tuple(observations),
    )


def _with_factors(profile: Profile, values: dict[str, float]) -> Profile:
    """Return the profile with these factors alone."""
    factors = {term: Factor(value=value, sigma=0.0) for term, value in values.items()}
    only = Calibration.model_construct(factors=factors, runs=())
    file = profile.file.model_copy(update={"calibration": only})
    return Profile(file, profile.ops, profile.collectives)


def _predict(
    profile: Profile, graph: ModelGraph, plan: Plan, sigma: float | None
) -> dict[str, float]:
    """Return predicted seconds of what a run records, by name; `sigma` is the imbalance of its
    routers, None where it has none that matters.
    """
    imbalance = None if sigma is None else Imbalance(sigma)
    costs = CostCache(graph, in_training(profile, plan.world_size), imbalance=imbalance)
    answer = estimate(graph, profile, plan, costs=costs)
    jobs = job_seconds(as_rank_timelines(answer.timeline), first_step=0)
    seconds = {_job(alike): median(found) for alike, found in jobs.items()}
    price = price_plan(plan, costs)
    for rank in range(plan.pp):
        own = stages_of_rank(plan, rank)
        after_s = price.exposed.after_s[own].sum()
        seconds[_after(rank)] = float(price.once.tied_s[rank] + after_s)
    # A recording begins with the first job, when the batch is on the device.
    seconds[STEP] = answer.step_s - answer.path.inputs_s
    return seconds


def _measure(measured: Sequence[RankTimeline], first: int) -> dict[str, tuple[float, float]]:
    """Return, by name, median seconds of what was recorded and the relative error of that."""
    num_steps = len(step_seconds(measured, first))  # the jobs of a step count as one sample
    found = {
        _job(alike): median_and_error(seconds, num_steps)
        for alike, seconds in job_seconds(measured, first_step=first).items()
    }
    found[STEP] = median_and_error(step_seconds(measured, first), num_steps)
    for pp_rank in {line.pp_rank for line in measured}:
        lines = [line for line in measured if line.pp_rank == pp_rank]
        by_step: dict[int, list[float]] = {}
        for line in lines:
            for span in line.spans:
                if span.kind == "REDUCE" and span.step >= first:
                    by_step.setdefault(span.step, []).append(span.end_s - span.start_s)
        if by_step:
            # In an exchange ranks wait for the last to arrive. That one waits for no other, so its
            # time, the shortest, is the exchange's.
            shortest = list(map(min, by_step.values()))
            found[_after(pp_rank)] = median_and_error(shortest, num_steps)
    return {what: value for what, value in found.items() if value[0] > 0}


def _job(jobs: JobsAlike) -> str:
    kind = "optimizer" if jobs.kind == OPTIMIZER else jobs.kind
    return f"{kind} of {jobs.place}"


def _after(pp_rank: int) -> str:
    return f"exchange after the last job of pp rank {pp_rank}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
