"""`planner compare`: a prediction beside a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.models import GivenModel
from commands.common.options import (
    ClusterOption,
    JsonOption,
    PlanFile,
    ProfileOption,
    RunFolder,
    TraceOption,
    spread,
)
from commands.common.prediction import predict
from commands.render.console import (
    check_writable,
    show_json,
    show_note,
    show_progress,
    show_results,
    show_written,
    write_trace,
)
from planner.errors import PlannerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from commands.common.prediction import Prediction
    from planner.timeline import RankTimeline


@spread(GivenModel)
def compare(
    plan: PlanFile,
    given: GivenModel,
    folder: RunFolder,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    trace: TraceOption = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Correct the profile by what the run shows."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --calibrate: directory to write. Default: the profile's own; of a shipped "
            "one a copy among your profiles."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Set the prediction beside a recorded run.

    Example: planner compare plan.json model.py run --calibrate
    """
    from commands.render.data import run_data
    from commands.render.run import describe_run
    from costmodel.compare import compare_run
    from costmodel.lanes import timeline_with_lanes
    from planner.language.plan import load_plan
    from planner.timeline import load_timeline

    model = given.file_of(plan)
    check_writable(trace, "the trace", (plan, model))
    if out is not None and not calibrate:
        raise PlannerError("--out is where --calibrate writes the profile; give both or neither")
    measured = load_timeline(folder)
    if calibrate and cluster is not None:
        raise PlannerError(
            "--calibrate corrects one profile and --cluster has a file of groups; drop one of them"
        )
    predicted = predict(
        plan, model, profile, cluster=cluster, doing="simulating",
        execution=load_plan(plan).runs_as,
    )  # fmt: skip
    estimated = predicted.estimate
    show_note(predicted.note)
    compared = compare_run(estimated.timeline, estimated.step_s, measured)
    told = run_data(compared)
    if not as_json:
        show_results(*describe_run(compared))
    if calibrate:
        told["calibration"] = _calibrate(predicted, measured, profile, out, as_json=as_json)
    if as_json:
        show_json(told)
    elif not calibrate and cluster is None:
        from commands.render.tables import NextCommands

        named = f" --profile {profile}" if profile else ""
        show_results(
            NextCommands(
                (
                    f"planner compare {plan} {model} {folder} --calibrate{named}",
                    "correct the profile by this run",
                ),
            )
        )
    if trace is not None:
        predicted_lines = timeline_with_lanes(predicted.plan, predicted.costs)
        write_trace(trace, as_json=as_json, predicted=predicted_lines, measured=measured)


def _calibrate(
    predicted: Prediction,
    measured: Sequence[RankTimeline],
    name: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Write the profile as the run corrects it, and say how much that changes."""
    from commands.render.data import calibration_data
    from commands.render.profile import describe_calibration
    from costmodel.calibrate import calibrated
    from profiles import save_profile
    from profiles.catalog import calibrated_dir

    profile = predicted.profile
    with show_progress("calibrating"):
        found = calibrated(profile, predicted.costs.graph, predicted.plan, measured)
    folder = out or calibrated_dir(name, profile)
    save_profile(found, folder)
    if not as_json:
        show_results(*describe_calibration(found))
    if profile.source == "shipped":
        show_note(
            f"{profile.name} is shipped and stays as it is; your calibrated copy is used with "
            f"--profile {folder}"
        )
    show_written(f"wrote {folder}", as_json)
    return calibration_data(found, folder)
