"""`planner launch`: a training script, a process for each rank of a plan."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.options import DeviceOption, JsonOption, PlanFile, PlansProfileOption
from commands.common.replan import replanner
from commands.render.console import show_json, show_note, show_results
from planner.errors import PlanError, ProfileError

if TYPE_CHECKING:
    from planner.runtime.preflight import PlannedRates


def launch(
    plan: PlanFile,
    script: Annotated[
        Path, typer.Argument(help="A script that calls planner.apply; any, with --unmodified.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", metavar="[ARGS]...")
    ] = None,
    unmodified: Annotated[
        bool,
        typer.Option(
            "--unmodified",
            help="The script is one for a single process: its model, optimizer and loop are taken "
            "over as they are.",
        ),
    ] = False,
    device: DeviceOption = None,
    kernels: Annotated[
        str | None,
        typer.Option(help="Of blocks: eager or compiled. Default: as the plan says."),
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(
            help="Nodes that run this same command. Default: those of srun, mpirun or the "
            "PyTorchJob that runs it, else 1."
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            help="This node's number, from 0, in the order of the plan's ranks; needed where nodes "
            "are unlike. Default: the launcher's, else nodes are sorted by name."
        ),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(help="host:port of one of the nodes, the same on all.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="0,2,3", help="GPUs of this node that its ranks take, in order."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Record what each rank does when in this folder.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Save checkpoints in this folder; go on from the newest there."),
    ] = None,
    save_every: Annotated[int, typer.Option(help="With --keep: steps between checkpoints.")] = 100,
    max_restarts: Annotated[
        int, typer.Option(help="With --keep: how often ranks may start again after a failure.")
    ] = 3,
    elastic: Annotated[
        int | None,
        typer.Option(help="With --keep: go on with what is left of the ranks, down to so many."),
    ] = None,
    on_oom: Annotated[
        str, typer.Option(help="With --keep, where memory is too small: stop, or replan.")
    ] = "stop",
    profile: PlansProfileOption = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="With --preflight: the cluster file that the plan was searched for."),
    ] = None,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight",
            help="Only check all nodes, then end: with 0, or 1 if there are problems.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Train: run a script on every rank of a plan.

    Options of `launch` itself come before PLAN; what follows SCRIPT is the script's own. With
    --keep the run starts again after failures, from its newest checkpoint.

    Example: planner launch --keep ckpts plan.json train.py
    """
    if cluster is not None and not preflight:
        raise PlanError("`cluster` says what links `preflight` compares with; give both")
    if preflight:
        return _preflight(
            plan, script, device, num_nodes=num_nodes, node_rank=node_rank, rendezvous=rendezvous,
            devices=None if devices is None else _numbers(devices), profile=profile,
            cluster=cluster, as_json=as_json,
        )  # fmt: skip
    from planner.language.plan import RUNTIME_OF, load_plan
    from planner.runtime.start.course import Keeping
    from planner.runtime.start.launch import launch as launch_ranks

    planned = load_plan(plan)
    runs_as = RUNTIME_OF.get(kernels or planned.kernels)  # type: ignore[call-overload]
    if runs_as is None:
        raise PlanError(f"`kernels` {kernels} was given; use {' or '.join(RUNTIME_OF)}")
    if planned.execution != runs_as:
        show_note(
            f"{plan} is priced for {planned.execution}; this is {runs_as}, which takes other "
            f"times: `planner estimate {plan} MODEL --execution {runs_as}` tells them"
        )
    if kernels not in (None, "eager") and planned.gather_pieces > 1:
        show_note(f"{plan} gathers in pieces beside products; compiled blocks gather whole")
    if on_oom not in ("stop", "replan"):
        raise PlanError(f"`on_oom` {on_oom} was given; use stop or replan")
    searches = elastic is not None or on_oom == "replan"
    if searches and keep is None:
        raise PlanError(
            "`elastic` and `on_oom` replan go on from checkpoints; give `keep` a folder"
        )
    keeping = None
    if keep is not None:
        keeping = Keeping(
            folder=keep,
            save_every=save_every,
            max_restarts=max_restarts,
            min_ranks=elastic,
            replan=replanner(load_plan(plan), profile) if searches else None,
            replans_on_oom=on_oom == "replan",
        )
    began = time.monotonic()
    with _stdout_to_stderr() if as_json else nullcontext():
        code = launch_ranks(
            plan,
            script,
            arguments or [],
            device,
            num_nodes=num_nodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            timeline=timeline,
            devices=None if devices is None else _numbers(devices),
            keeping=keeping,
            unmodified=unmodified,
            kernels=kernels,
        )
    if code == 0 and timeline is not None and not as_json and not node_rank:
        from commands.render.tables import NextCommands

        model = load_plan(plan).model.file or "MODEL"
        show_results(
            NextCommands(
                (f"planner compare {plan} {model} {timeline}", "was the prediction right?"),
            )
        )
    if as_json:
        show_json(
            {
                "plan_file": str(plan),
                "script": str(script),
                "exit_code": code,
                "took_s": time.monotonic() - began,
                "run_folder": None if timeline is None else str(timeline),
                "checkpoint_folder": None if keep is None else str(keep),
            }
        )
    return code


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let ranks that start meanwhile print on stderr: stdout has a JSON document."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _preflight(
    plan: Path,
    script: Path,
    device: str | None,
    *,
    num_nodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    devices: Sequence[int] | None,
    profile: str | None,
    cluster: Path | None,
    as_json: bool,
) -> int:
    from commands.render.node_checks import describe_preflight, problem_lines
    from planner.runtime.preflight import preflight

    planned, note = _planned_rates(plan, profile, cluster)
    report = preflight(
        plan, script, device, num_nodes=num_nodes, node_rank=node_rank, rendezvous=rendezvous,
        devices=devices, planned=planned,
    )  # fmt: skip
    if report.is_first:
        show_note(note)
        if as_json:
            show_json(report.to_dict())
        else:
            show_results(*describe_preflight(report))
            print("\n".join(problem_lines(report)))
    elif report.problems:
        show_note("planner: preflight found problems; the node that has the rendezvous tells them")
    return 1 if report.problems else 0


def _planned_rates(
    path: Path, name: str | None, cluster: Path | None
) -> tuple[PlannedRates | None, str]:
    """Return the rates that a plan was priced with, and what to tell where they are not here."""
    from commands.common.inputs import profile_named
    from costmodel.planned_rates import between_nodes_seconds, planned_seconds
    from planner.language.plan import load_plan
    from planner.runtime.preflight import BETWEEN_NODES, Exchange, PlannedRates

    try:
        plan = load_plan(path)
    except PlanError:  # told with the other problems of all nodes
        return None, ""
    try:
        machine, _ = profile_named(name or (None if cluster else plan.cluster.name), cluster)
    except ProfileError as error:
        if name is not None or cluster is not None:
            raise
        return None, (
            f"links are not compared with planned rates: the plan was priced with "
            f"{plan.cluster.name!r} ({error}); `profile` or `cluster` names another"
        )
    of_ranks = planned_seconds(plan, machine)

    def seconds(exchange: Exchange, num_bytes: int) -> float:
        if exchange.axis == BETWEEN_NODES:  # of nodes as they are
            return between_nodes_seconds(machine, num_bytes)
        return of_ranks(exchange.kind, exchange.ranks, num_bytes)

    return PlannedRates(source=machine.name, seconds=seconds), ""


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise PlanError(
            f"`devices` {text!r} is no list of numbers; give for example 0,2,3"
        ) from None
