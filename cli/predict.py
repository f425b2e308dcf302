"""`planner show`, `estimate`, `simulate` and `dryrun`: what a plan is and should cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cli.inputs import graph_of, graph_of_plan, profile_named
from cli.options import ClipOption, ModelFile, PlanFile, ProfileOption, TraceOption
from cli.output import check_writable, show_note, show_progress, show_results, write_trace
from planner.errors import PlannerError

if TYPE_CHECKING:
    from costmodel import CostCache, Estimate
    from costmodel.table.fusion import Kernels
    from planner.plan import Plan


def show(
    plan: PlanFile,
    model: Annotated[
        Path | None, typer.Argument(help="The model file, to name blocks and parameters.")
    ] = None,
) -> None:
    """Print what a plan decides and should cost."""
    from planner.plan import load_plan
    from planner.plan.describe import describe_plan

    loaded = load_plan(plan)
    graph = None if model is None else graph_of(model, loaded.precision)
    show_results(*describe_plan(loaded, graph))


def estimate(
    plan: Annotated[Path | None, typer.Argument(help="A plan made by `planner search`.")] = None,
    model: Annotated[Path | None, typer.Argument(help="The model file of the plan.")] = None,
    profile: ProfileOption = None,
    kernels: Annotated[
        str,
        typer.Option(
            help="eager: ops one by one, as `planner launch` runs them; fused: the step time if "
            "what lies between products were fused, as a compiler does."
        ),
    ] = "eager",
    clip_gradients: ClipOption = False,
    batch: Annotated[
        Path | None, typer.Option(help="Instead of PLAN MODEL: a CSV of runs, one a row.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --batch: the CSV to write, with predictions added.")
    ] = None,
) -> None:
    """Predict a plan's step time and memory, in parts."""
    if batch is not None or out is not None:
        if batch is None or out is None:
            raise PlannerError("--batch and --out go together: --batch IN.csv --out OUT.csv")
        if plan is not None:
            raise PlannerError("give PLAN and MODEL, or --batch IN.csv --out OUT.csv, not both")
        if profile is not None:
            raise PlannerError("rows say their machine by `gpu`; leave --profile out")
        if kernels != "eager" or clip_gradients:
            raise PlannerError(
                "rows say their software by `stack`; leave --kernels and --clip-gradients out"
            )
        _estimate_rows(batch, out)
        return
    if plan is None or model is None:
        raise PlannerError("give PLAN and MODEL, or --batch IN.csv --out OUT.csv")
    from planner.plan.describe import describe_estimate

    predicted = predict(
        plan, model, profile, doing="estimating", kernels=_parse_kernels(kernels),
        clip_gradients=clip_gradients,
    )  # fmt: skip
    show_note(predicted.note)
    cluster = predicted.costs.profile.name
    show_results(*describe_estimate(predicted.estimate.to_dict(), cluster=cluster))


def _parse_kernels(text: str) -> Kernels:
    from costmodel.table.fusion import Kernels

    for kernels in get_args(Kernels):
        if text == kernels:
            return kernels
    raise PlannerError(f"--kernels {text} was given; use {' or '.join(get_args(Kernels))}")


def _estimate_rows(source: Path, target: Path) -> None:
    from costmodel.table.rows.row_files import estimate_file

    check_writable(target, "predictions", (source,))
    with show_progress("estimating"):
        num_rows, num_predicted = estimate_file(source, target)
    print(f"wrote {target}: {num_predicted} of {num_rows} rows predicted, the rest say why not")


def simulate(
    plan: PlanFile,
    model: ModelFile,
    profile: ProfileOption = None,
    trace: TraceOption = None,
) -> None:
    """Play a plan's timetable: who works and waits when."""
    from costmodel.compare import as_rank_timelines
    from costmodel.describe import describe_timeline
    from costmodel.estimate import plan_job_seconds

    check_writable(trace, "the trace", (plan, model))
    predicted = predict(plan, model, profile, doing="simulating")
    seconds = plan_job_seconds(predicted.plan, predicted.costs)
    show_note(predicted.note)
    timeline = predicted.estimate.timeline
    show_results(*describe_timeline(timeline, seconds))
    write_trace(trace, predicted=as_rank_timelines(timeline))


def dryrun(
    plan: PlanFile,
    model: ModelFile,
    rank: Annotated[int, typer.Option(help="The rank to look at.")] = 0,
) -> None:
    """Run one rank on fake tensors: its memory, job by job."""
    from planner.graph.model_file import load_model_file
    from planner.plan import load_plan
    from planner.plan.describe import describe_dry_run
    from planner.runtime.check.dryrun import dry_run

    loaded = load_plan(plan)
    with show_progress("dry run") as progress:
        progress(0.0, "capturing the model")
        graph = graph_of_plan(loaded, model)
        progress(0.5, f"running rank {rank} on fake tensors")
        run = dry_run(loaded, graph, load_model_file(model).build, rank=rank)
    show_results(*describe_dry_run(run))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan, what it should cost, and the prices that say so.

    `note` is a line for the user if the profile is not this machine's own.
    """

    plan: Plan
    costs: CostCache
    estimate: Estimate
    note: str


def predict(
    plan: Path,
    model: Path,
    profile: str | None,
    *,
    doing: str,
    kernels: Kernels = "eager",
    clip_gradients: bool = False,
) -> Prediction:
    """Price a plan file for a model file under a profile, with a progress bar."""
    from costmodel import CostCache
    from costmodel import estimate as estimate_plan
    from costmodel.in_training import in_training
    from planner.plan import load_plan

    loaded = load_plan(plan)
    machine, note = profile_named(profile)
    with show_progress(doing):
        graph = graph_of_plan(loaded, model)
        costs = CostCache(
            graph, in_training(machine, loaded.world_size), kernels=kernels,
            clips_gradients=clip_gradients,
        )  # fmt: skip
        estimated = estimate_plan(graph, machine, loaded, costs=costs)
    return Prediction(plan=loaded, costs=costs, estimate=estimated, note=note)
