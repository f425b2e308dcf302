"""`planner launch`: a training script, a process for each rank of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.common.options import DeviceOption, PlanFile
from commands.render.console import show_note
from planner.errors import PlanError


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
    devices: Annotated[
        str | None,
        typer.Option(metavar="0,2,3", help="GPUs of this node that its ranks take, in order."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Record what each rank does when in this folder.")
    ] = None,
) -> int:
    """Train: run a script on every rank of a plan.

    Options of `launch` itself come before PLAN; what follows SCRIPT is the script's own.
    """
    from planner.plan import OURS, load_plan
    from planner.runtime.start.launch import launch as launch_ranks

    priced_for = load_plan(plan).execution
    if priced_for != OURS:
        show_note(
            f"{plan} is priced for {priced_for}; this is {OURS}, which takes other times: "
            f"`planner estimate {plan} MODEL --execution {OURS}` tells them"
        )
    return launch_ranks(
        plan,
        script,
        arguments or [],
        device,
        num_nodes=num_nodes,
        rendezvous=rendezvous,
        timeline=timeline,
        devices=None if devices is None else _numbers(devices),
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise PlanError(
            f"`devices` {text!r} is no list of numbers; give for example 0,2,3"
        ) from None
