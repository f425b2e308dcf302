"""`planner verify`: a parallel run against one process, in fp64."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.common.inputs import graph_of_plan
from commands.common.options import DeviceOption, ModelFile, PlanFile
from commands.render.console import show_progress, show_results


def verify(
    plan: PlanFile,
    model: ModelFile,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    device: DeviceOption = None,
) -> int:
    """Prove that a plan computes what one process does.

    Trains a few steps both ways in fp64 and exits with 1 if they differ by more than rounding does.
    """
    from commands.render.checks import describe_verification
    from planner.plan import load_plan
    from planner.runtime.check.verify import verify as verify_plan

    loaded = load_plan(plan)
    with show_progress("verifying") as progress:
        progress(0.0, "capturing the model")
        graph_of_plan(loaded, model)
        report = verify_plan(plan, model, steps=steps, device=device, progress=progress)
    show_results(*describe_verification(report))
    return 0 if report.passed else 1
