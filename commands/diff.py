"""`planner diff`: what two plans of one model decide differently, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from commands.common.inputs import graph_of_plan
from commands.common.models import MaybeModel
from commands.common.options import JsonOption, PlanFile, spread
from commands.render.console import check_writable, show_json, show_results
from planner.files import write_atomically


@spread(MaybeModel)
def diff(
    plan: PlanFile,
    other: Annotated[Path, typer.Argument(help="Another plan of the same model.")],
    given: MaybeModel,
    patch: Annotated[
        Path | None, typer.Option(help="Also write a JSON patch (RFC 6902) from PLAN to OTHER.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what two plans decide differently, and its cost.

    Example: planner diff plan.json other.json examples/gpt.py
    """
    from commands.render.plans.diff import describe_difference
    from planner.language.plan import load_plan
    from planner.language.plan.diff import as_data, compared
    from planner.language.plan.diff import patch as patch_of

    check_writable(patch, "the patch", (plan, other))
    before, after = load_plan(plan), load_plan(other)
    model = given.file_of(before)
    graph = None if model is None else graph_of_plan(before, model)
    found = compared(before, after, graph)
    if patch is not None:
        write_atomically(patch, json.dumps(patch_of(before, after), indent=1) + "\n")
    if as_json:
        show_json(as_data(found))
    else:
        show_results(*describe_difference(found))
