"""A search's result with all that is told of it, for the screen, the plan's file and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.prediction import Prediction, interval_of

if TYPE_CHECKING:
    from commands.render.plans.answer import Answer
    from costmodel import CostCache
    from planner.language.graph import ModelGraph
    from planner.language.plan import Plan
    from profiles import Profile
    from search import Point, SearchRequest, SearchResult


def predict_result(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    plan: Plan,
    *,
    costs: CostCache | None = None,
) -> Prediction:
    """Return what a plan that a search found should cost; `costs` are the search's, if kept."""
    from costmodel import estimate
    from costmodel.estimate import cost_cache, costs_under
    from costmodel.execution import find_execution

    if costs is None:
        costs = cost_cache(
            graph,
            profile,
            plan.world_size,
            execution=find_execution(request.execution),
            clips_gradients=request.clip_gradients,
            imbalance=request.imbalance(profile),
        )
    costs = costs_under(plan, costs)
    priced = estimate(graph, profile, plan, costs=costs)
    return Prediction(plan=plan, profile=profile, costs=costs, estimate=priced, note="")


def answer_of(
    predicted: Prediction,
    request: SearchRequest,
    result: SearchResult,
    *,
    model: str,
    out: Path,
    points: Sequence[Point] = (),
    machine: str = "",
) -> Answer:
    """Return the plan found with all that is told of it; its file says so, too."""
    from commands.render.plans.answer import Answer
    from commands.render.plans.words import degrees_spelled
    from costmodel.compare import as_rank_timelines
    from costmodel.uncertainty import plan_odds_of_fit
    from search.report.overview import find_overview

    chosen, priced, interval = predicted.plan, predicted.estimate, interval_of(predicted)
    limit = request.memory_limit_bytes
    overview = find_overview(chosen, predicted.costs, priced, interval, memory_limit_bytes=limit)
    odds = 0.0
    if result.riskier is not None:
        odds = plan_odds_of_fit(result.riskier, predicted.costs.profile, limit)
    told = {
        **chosen.estimate,
        **priced.to_dict(),
        **overview.told(),
        "runners_up": [asdict(runner) for runner in result.runners_up],
        "front": [
            {
                "label": degrees_spelled(point.plan),
                "step_s": point.step_s,
                "peak_bytes": point.peak_bytes,
                "num_devices": point.num_devices,
            }
            for point in points
        ],
        **({} if limit is None else {"memory_limit_bytes": limit}),
    }
    return Answer(
        result=result,
        plan=chosen.model_copy(update={"estimate": told}),
        overview=overview,
        predicted=as_rank_timelines(priced.timeline),
        model_file=model,
        out=out,
        machine=machine,
        odds_of_riskier=odds,
    )
