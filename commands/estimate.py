"""`planner estimate`: step time and memory of a plan, or of rows of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.long_run import LongRun
from commands.common.models import MaybeModel
from commands.common.options import (
    RUNTIMES,
    ClipOption,
    ClusterOption,
    JsonOption,
    ProfileOption,
    spread,
)
from commands.common.prediction import overview_of, predict
from commands.render.console import (
    check_writable,
    show_json,
    show_note,
    show_progress,
    show_results,
)
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.language.plan import Plan


@spread(LongRun)
@spread(MaybeModel)
def estimate(
    plan: Annotated[Path | None, typer.Argument(help="A plan made by `planner search`.")] = None,
    *,
    given: MaybeModel,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    execution: Annotated[
        str | None,
        typer.Option(help=f"The runtime that trains: {RUNTIMES} Default: the plan's."),
    ] = None,
    clip_gradients: ClipOption = False,
    long_run: LongRun,
    batch: Annotated[
        Path | None, typer.Option(help="Instead of PLAN MODEL: a CSV of runs, one a row.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --batch: the CSV to write, with predictions added.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a plan's step time and memory, in parts.

    Example: planner estimate plan.json model.py --execution megatron-core
    """
    if batch is not None or out is not None:
        if batch is None or out is None:
            raise PlannerError(
                "--batch and --out go together; give both: --batch IN.csv --out OUT.csv"
            )
        if plan is not None:
            raise PlannerError("give PLAN and MODEL, or --batch IN.csv --out OUT.csv, not both")
        if profile is not None or cluster is not None:
            machine = "--cluster" if profile is None else "--profile"
            raise PlannerError(f"rows say their machine by `gpu`; leave {machine} out")
        if execution is not None or clip_gradients:
            raise PlannerError(
                "rows say their software by `stack`; leave --execution and --clip-gradients out"
            )
        if long_run != LongRun():
            raise PlannerError("failures are of one run: give PLAN and MODEL, not --batch")
        _estimate_rows(batch, out, as_json)
        return
    model = None if plan is None else given.file_of(plan)
    if plan is None or model is None:
        missing = "PLAN" if plan is None else "MODEL"
        raise PlannerError(
            f"{missing} was not given; give PLAN and MODEL, or --batch IN.csv --out OUT.csv"
        )
    failures = long_run.failures()
    from commands.render.data import goodput_data
    from commands.render.goodput import describe_goodput
    from commands.render.plans.plan import describe_estimate

    predicted = predict(
        plan, model, profile, doing="estimating", cluster=cluster, execution=execution,
        clip_gradients=clip_gradients,
    )  # fmt: skip
    show_note(predicted.note)
    machine = predicted.costs.profile.name
    overview = overview_of(predicted)
    told = predicted.estimate.to_dict() | overview.told()
    runtime = predicted.costs.execution.name
    found, num_nodes = None, _num_nodes(predicted.plan)
    if failures is not None:
        from costmodel.failures import goodput

        found = goodput(failures, num_nodes)
    if as_json:
        data = {"execution": runtime, "profile": machine, **overview.to_dict()}
        if found is not None:
            data["goodput"] = goodput_data(found, num_nodes=num_nodes, step_s=overview.step_s)
        show_json(data)
        return
    parts = describe_estimate(told, predicted.plan.stages, cluster=machine, execution=runtime)
    if found is not None:
        parts += describe_goodput(found, num_nodes=num_nodes, step_s=told["step_s"])
    show_results(*parts)


def _num_nodes(plan: Plan) -> int:
    return -(-plan.world_size // plan.cluster.devices_per_node)


def _estimate_rows(source: Path, target: Path, as_json: bool) -> None:
    from costmodel.table.rows.rows import estimate_file

    check_writable(target, "predictions", (source,))
    with show_progress("estimating"):
        num_rows, num_predicted = estimate_file(source, target)
    if as_json:
        counts = {"num_rows": num_rows, "num_predicted": num_predicted}
        show_json({"rows_file": str(target), **counts})
        return
    print(f"wrote {target}: {num_predicted} of {num_rows} rows predicted, the rest say why not")
