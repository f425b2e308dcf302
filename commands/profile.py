"""`planner profile`: measure this machine, or show what a profile holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from commands.common.inputs import graph_of, parse_precision, parse_seconds
from commands.common.options import DeviceOption, JsonOption
from commands.render.console import show_json, show_note, show_progress, show_results, show_written
from planner.errors import PlannerError

_LATE = 1.2
"""A budget is kept where the command takes no more than so many times it."""


def profile(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Model files: measure just what a search of them can ask for. Without one: a "
            "standard grid. Or `show DIR`: print what a profile holds.",
            metavar="[MODEL]...",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Devices that a search will be asked for.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine. Default: all GPUs, or 2.")
    ] = None,
    device: DeviceOption = None,
    num_nodes: Annotated[
        int, typer.Option(min=1, help="Nodes that run this same command, to be measured as one.")
    ] = 1,
    rendezvous: Annotated[
        str, typer.Option(help="With --num-nodes: host:port of one of the nodes, the same on all.")
    ] = "",
    precision: Annotated[
        str,
        typer.Option(
            help="model: the model's own dtypes; bf16, fp16, fp8, fp8-tensorwise or mxfp8: as "
            "trained with --precision."
        ),
    ] = "model",
    grid: Annotated[
        bool, typer.Option("--grid", help="With model files: measure the standard grid, too.")
    ] = False,
    compiled: Annotated[
        bool | None,
        typer.Option(help="Measure whole blocks compiled, too. Default: on GPUs."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time to spend, such as 90s or 5m; most useful first.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write. Default: this machine's own profile.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Only check this profile directory.")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="With show: also write plots to this HTML file.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Measure this machine, once; run again to resume.

    The same command goes on where it was stopped. `planner profile show DIR` prints what a
    profile holds.

    Example: planner profile --budget 5m model.py
    """
    began = time.monotonic()
    trained_in = parse_precision(precision)
    if check is not None:
        return _check(check, as_json)
    if models and str(models[0]) == "show":
        if len(models) != 2:
            raise PlannerError(
                "profile show prints one profile; give one directory or shipped name"
            )
        return _show(str(models[1]), plots, as_json)
    import profiles
    from commands.render.data import profile_data
    from commands.render.profile import describe_profile
    from planner.nodes.launchers import started

    place = started(os.environ)
    is_alone = num_nodes == 1 and place is None
    device = _device(device)
    folder = out or profiles.own_profile_dir(device)
    ranks_here = nproc or (gpus if is_alone else None) or _num_devices(device)
    processes = num_nodes if place is None or num_nodes > 1 else place.count
    is_rank = num_nodes == 1 and place is not None and not place.is_node
    show_note(_too_few(gpus, processes * (1 if is_rank else ranks_here)))
    budget_s = parse_seconds(budget, "--budget")
    with show_progress("profiling") as progress:
        measured = profiles.measure_profile(
            folder,
            nproc=ranks_here,
            device=device,
            models=[graph_of(model, trained_in) for model in models or ()],
            gpus=gpus,
            grid=grid,
            compiled=compiled,
            budget_s=budget_s,
            began=began,
            progress=progress,
            num_nodes=num_nodes,
            rendezvous=rendezvous,
        )
    if measured is None:  # one of several processes that a launcher started; rank 0 tells
        return 0
    took_s = time.monotonic() - began
    if budget_s is not None and took_s > _LATE * budget_s:
        show_note(
            f"! it took {took_s:.0f} s: --budget {budget} is less than what no profile is without "
            "(a probe of every op, three sizes of every collective, links and memory)"
        )
    if as_json:
        show_json(profile_data(measured, str(folder)))
        return 0
    show_results(describe_profile(measured)[0])
    print("\n".join(measured.file.findings), end="\n" * bool(measured.file.findings))
    print(f"wrote {folder}; see all of it with: planner profile show {folder}")
    return 0


def _too_few(gpus: int | None, num_ranks: int) -> str | None:
    """Say that a search would be refused, where it will be asked for more devices than a profile of
    so many ranks describes.
    """
    if gpus is None or gpus <= num_ranks:
        return None
    return (
        f"! --gpus {gpus} was given, and {num_ranks} ranks are measured: `planner search` will "
        f"refuse more than {num_ranks} devices of this profile; measure on as many ranks (--nproc, "
        "--num-nodes), or search with --cluster, a file that describes the others"
    )


def _check(folder: Path, as_json: bool) -> int:
    import profiles

    problems = profiles.check_profile(folder)
    if as_json:
        show_json({"profile_folder": str(folder), "problems": list(problems)})
        return 1 if problems else 0
    print("\n".join(problems) or f"{folder} is a complete profile")
    return 1 if problems else 0


def _show(name: str, plots: Path | None, as_json: bool) -> int:
    import profiles
    from commands.render.data import profile_data
    from commands.render.profile import describe_profile, write_plots

    loaded = profiles.load_profile(name)
    if as_json:
        show_json(profile_data(loaded, name))
    else:
        show_results(*describe_profile(loaded))
    if plots is not None:
        write_plots(loaded, plots)
        show_written(f"wrote {plots}", as_json)
    return 0


def _device(name: str | None) -> str:
    """Return the device asked for, or the one found; raise where it is not here."""
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in (None, "cpu", "cuda"):
        raise PlannerError(f"--device {name} is unknown; use cpu or cuda")
    if name == "cuda" and found != name:
        raise PlannerError("--device cuda was given and torch finds no GPU here; use --device cpu")
    return name or found


def _num_devices(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 2
