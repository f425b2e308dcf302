"""`planner show`: what a plan decides, the price it was found with, and a report of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.inputs import graph_of
from commands.common.models import MaybeModel
from commands.common.options import (
    ClusterOption,
    JsonOption,
    PlanFile,
    PlansProfileOption,
    spread,
)
from commands.common.prediction import Prediction, interval_of, predict
from commands.render.console import (
    check_writable,
    show_json,
    show_note,
    show_results,
    show_written,
)
from planner.errors import PlannerError
from planner.files import write_atomically

if TYPE_CHECKING:
    from planner.timeline import RankTimeline


@spread(MaybeModel)
def show(
    plan: PlanFile,
    given: MaybeModel,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a report as one HTML file that works offline; needs MODEL."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="With --html: a folder of `planner launch --timeline`, drawn beside."),
    ] = None,
    profile: PlansProfileOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a plan decides and should cost, or draw it.

    Example: planner show plan.json model.py --html report.html
    """
    model = given.file_of(plan)
    if html is not None:
        _draw(plan, model, html, run=run, profile=profile, cluster=cluster, as_json=as_json)
        return
    for flag, value in (("--run", run), ("--profile", profile), ("--cluster", cluster)):
        if value is not None:
            raise PlannerError(f"{flag} {value} was given; it is for a report: give --html too")
    from commands.render.data import plan_data
    from commands.render.plans.plan import describe_plan
    from planner.language.plan import load_plan

    loaded = load_plan(plan)
    graph = None if model is None else graph_of(model, loaded.precision)
    if as_json:
        show_json(plan_data(plan, loaded))
    else:
        show_results(*describe_plan(loaded, graph))


def _draw(
    plan: Path,
    model: Path | None,
    html: Path,
    *,
    run: Path | None,
    profile: str | None,
    cluster: Path | None,
    as_json: bool,
) -> None:
    from commands.render.html.page import render_report
    from search.report.report_numbers import gather_report

    if model is None:
        raise PlannerError(
            "--html was given without a model file; give it after the plan, since prices and "
            "names of blocks come from the model"
        )
    check_writable(html, "the report", (plan, model))
    measured = _recorded(run)
    predicted = predict(
        plan, model, profile, cluster=cluster, doing="estimating", on_plans_machine=True
    )
    show_note(predicted.note)
    _check_run(predicted, measured)
    numbers = gather_report(
        predicted.plan,
        predicted.costs,
        predicted.estimate,
        interval_of(predicted),
        measured=measured,
    )
    write_atomically(html, render_report(numbers))
    show_written(f"wrote {html}; open it in a browser", as_json)
    if as_json:
        show_json({"report_file": str(html), **numbers.overview.to_dict()})


def _recorded(run: Path | None) -> tuple[RankTimeline, ...]:
    from planner.timeline import load_timeline

    return () if run is None else load_timeline(run)


def _check_run(predicted: Prediction, measured: tuple[RankTimeline, ...]) -> None:
    """Refuse a recording of another plan."""
    if measured:
        from costmodel.compare import compare_run

        compare_run(predicted.estimate.timeline, predicted.estimate.step_s, measured)
