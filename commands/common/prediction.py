"""What a plan file should cost, for the commands that show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.inputs import graph_of_plan, profile_named, profile_of_plan
from commands.render.console import show_progress

if TYPE_CHECKING:
    from costmodel import CostCache, Estimate
    from costmodel.uncertainty import Interval
    from planner.language.plan import Plan
    from profiles import Profile
    from search.report.overview import Overview


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan, what it should cost, and the prices that say so.

    `profile` is the one that was named or chosen; `note` is a line for the user if that is not this
    machine's own.
    """

    plan: Plan
    profile: Profile
    costs: CostCache
    estimate: Estimate
    note: str


def predict(
    plan: Path,
    model: Path,
    profile: str | None,
    *,
    doing: str,
    cluster: Path | None = None,
    execution: str | None = None,
    clip_gradients: bool = False,
    on_plans_machine: bool = False,
) -> Prediction:
    """Price a plan file for a model file, a profile or cluster file, and a runtime (the plan's own
    where none is given), with a progress bar. Where no machine is named it is this one's profile,
    or that which the plan was searched for.
    """
    from costmodel import estimate as estimate_plan
    from costmodel.estimate import cost_cache, costs_under, imbalance_of_plan
    from costmodel.execution import find_execution
    from planner.language.plan import load_plan

    runtime = None if execution is None else find_execution(execution)
    loaded = load_plan(plan)
    runtime = runtime or find_execution(loaded.execution)
    if on_plans_machine and profile is None and cluster is None:
        machine, note = profile_of_plan(loaded)
    else:
        machine, note = profile_named(profile, cluster)
    with show_progress(doing):
        graph = graph_of_plan(loaded, model)
        costs = cost_cache(
            graph,
            machine,
            loaded.world_size,
            execution=runtime,
            clips_gradients=clip_gradients,
            imbalance=imbalance_of_plan(loaded, machine, runtime),
        )
        costs = costs_under(loaded, costs)
        estimated = estimate_plan(graph, machine, loaded, costs=costs)
    return Prediction(plan=loaded, profile=machine, costs=costs, estimate=estimated, note=note)


def overview_of(predicted: Prediction) -> Overview:
    """Return the plan and its price at a glance."""
    from search.report.overview import find_overview

    return find_overview(
        predicted.plan,
        predicted.costs,
        predicted.estimate,
        interval_of(predicted),
        memory_limit_bytes=predicted.plan.estimate.get("memory_limit_bytes"),
    )


def interval_of(predicted: Prediction) -> Interval:
    """Return where the step lies in four of five cases."""
    from costmodel.runtime_calibration import calibrated_interval
    from costmodel.uncertainty import runtime_interval, step_interval

    # The interval stands on what the profile's own answers, or the runtime's, were held against.
    runtime, graph = predicted.costs.execution, predicted.costs.graph
    if runtime.prices == "profile":
        return step_interval(graph, predicted.profile, predicted.plan, runtime)
    step_s = predicted.estimate.step_s
    calibrated = calibrated_interval(predicted.plan, predicted.costs, step_s)
    return calibrated or runtime_interval(graph, runtime, step_s)
