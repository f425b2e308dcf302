"""`planner verify`, `launch`, `timeline` and `compare`: a plan run, and what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.inputs import graph_of_plan
from cli.options import (
    DeviceOption,
    ModelFile,
    PlanFile,
    ProfileOption,
    RunFolder,
    TraceOption,
)
from cli.output import check_writable, show_note, show_progress, show_results, write_trace
from cli.predict import predict


def verify(
    plan: PlanFile,
    model: ModelFile,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    device: DeviceOption = None,
) -> int:
    """Prove that a plan computes what one process does.

    Trains a few steps both ways in fp64 and exits with 1 if they differ by more than rounding does.
    """
    from planner.plan import load_plan
    from planner.plan.describe import describe_verification
    from planner.runtime.check.verify import verify as verify_plan

    loaded = load_plan(plan)
    with show_progress("verifying") as progress:
        progress(0.0, "capturing the model")
        graph_of_plan(loaded, model)
        report = verify_plan(plan, model, steps=steps, device=device, progress=progress)
    show_results(*describe_verification(report))
    return 0 if report.passed else 1


def launch(
    plan: PlanFile,
    script: Annotated[Path, typer.Argument(help="A script that calls planner.apply.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", metavar="[ARGS]...")
    ] = None,
    device: DeviceOption = None,
    num_nodes: Annotated[int, typer.Option(help="Nodes that run this same command.")] = 1,
    rendezvous: Annotated[
        str, typer.Option(help="host:port of one of the nodes, the same on all.")
    ] = "localhost:0",
    timeline: Annotated[
        Path | None, typer.Option(help="Record what each rank does when in this folder.")
    ] = None,
) -> int:
    """Train: run a script on every rank of a plan.

    Options of `launch` itself come before PLAN; what follows SCRIPT is the script's own.
    """
    from planner.runtime.start.launch import launch as launch_ranks

    return launch_ranks(
        plan,
        script,
        arguments or [],
        device,
        num_nodes=num_nodes,
        rendezvous=rendezvous,
        timeline=timeline,
    )


def timeline(folder: RunFolder, trace: TraceOption = None) -> None:
    """Report a recorded run, and make one trace of it."""
    from planner.plan.describe import describe_timeline
    from planner.timeline import load_timeline

    check_writable(trace, "the trace")
    measured = load_timeline(folder)
    show_results(*describe_timeline(measured))
    write_trace(trace, measured=measured)


def compare(
    plan: PlanFile,
    model: ModelFile,
    folder: RunFolder,
    profile: ProfileOption = None,
    trace: TraceOption = None,
) -> None:
    """Set the prediction beside a recorded run."""
    from costmodel.compare import as_rank_timelines, compare_run
    from costmodel.describe import describe_run
    from planner.timeline import load_timeline

    check_writable(trace, "the trace", (plan, model))
    measured = load_timeline(folder)
    predicted = predict(plan, model, profile, doing="simulating")
    estimated = predicted.estimate
    show_note(predicted.note)
    show_results(*describe_run(compare_run(estimated.timeline, estimated.step_s, measured)))
    write_trace(trace, predicted=as_rank_timelines(estimated.timeline), measured=measured)
