"""`planner show`: what a plan decides, and the price it was found with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.inputs import graph_of
from commands.common.options import PlanFile
from commands.render.console import show_results


def show(
    plan: PlanFile,
    model: Annotated[
        Path | None, typer.Argument(help="The model file, to name blocks and parameters.")
    ] = None,
) -> None:
    """Print what a plan decides and should cost.

    Example: planner show plan.json model.py
    """
    from commands.render.plan import describe_plan
    from planner.plan import load_plan

    loaded = load_plan(plan)
    graph = None if model is None else graph_of(model, loaded.precision)
    show_results(*describe_plan(loaded, graph))
