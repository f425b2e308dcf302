"""`planner dryrun`: one rank of a plan on fake tensors."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.common.inputs import graph_of_plan
from commands.common.models import GivenModel
from commands.common.options import JsonOption, PlanFile, spread
from commands.render.console import show_json, show_progress, show_results


@spread(GivenModel)
def dryrun(
    plan: PlanFile,
    given: GivenModel,
    rank: Annotated[int, typer.Option(help="The rank to look at.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run one rank on fake tensors: its memory, job by job.

    Example: planner dryrun plan.json model.py --rank 3
    """
    from commands.render.checks import describe_dry_run
    from commands.render.data import dry_run_data
    from planner.capture.source.model_file import load_model_file
    from planner.language.plan import load_plan
    from planner.runtime.proofs.dryrun import dry_run

    loaded = load_plan(plan)
    model = given.file_of(loaded)
    with show_progress("dry run") as progress:
        progress(0.0, "capturing the model")
        graph = graph_of_plan(loaded, model)
        progress(0.5, f"running rank {rank} on fake tensors")
        run = dry_run(loaded, graph, load_model_file(model).build, rank=rank)
    if as_json:
        show_json(dry_run_data(run))
    else:
        show_results(*describe_dry_run(run))
