"""`planner calibrate`: logs and traces of runs of other stacks beside their prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.options import JsonOption
from commands.render.console import (
    show_json,
    show_note,
    show_progress,
    show_results,
    show_written,
)
from planner.errors import PlannerError

if TYPE_CHECKING:
    from commands.doors.runs.folder import RunFiles
    from costmodel.runtime_calibration import ComparedRun
    from profiles import Profile

Row = dict[str, str]
"""A run's columns."""


def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Folders of runs, each with a log or trace and what configures the run; or files "
            "with commas between: train.log,run.sh",
            metavar="RUN...",
        ),
    ],
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Devices of each run. Default: as its files say.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The device of the runs. Default: as their files say.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="A profile of the runs' device. Default: the shipped one."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write. Default: the profile's own; of a shipped one a copy among "
            "your profiles."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Learn from logs and traces of other stacks' runs.

    Example: planner calibrate runs/tp4 runs/tp8 --gpu H100
    """
    from commands.doors.runs import describe
    from commands.doors.runs.folder import find_run
    from commands.render.logs import describe_runs, runs_data
    from commands.render.profile import describe_runtimes
    from costmodel.runtime_calibration import with_runs
    from profiles import load_profile, save_profile

    asked = {name: value for name, value in (("gpus", gpus), ("gpu", gpu)) if value is not None}
    given = None if profile is None else load_profile(profile)
    # (A profile has the name of its device, and of a link.)
    device = {} if given is None else {"gpu": given.name.partition("@")[0]}
    notes: list[str] = []
    found: list[tuple[RunFiles, Row]] = []
    for text in runs:
        files = find_run(text)
        run = describe(files.configurations, told={**device, **files.told}, asked=asked)
        notes += [*files.notes, *(f"{files.name}: {note}" for note in run.notes)]
        found.append((files, run.texts))
    machine, folder = _machine_of([row for _, row in found], given, profile, out)
    with show_progress("pricing the runs"):
        compared = [_compared(files, row, machine, notes) for files, row in found]
    by_runtime: dict[str, list[Any]] = {}
    for each in compared:
        by_runtime.setdefault(each.runtime, []).append(each.run)
    taught = with_runs(machine, by_runtime)
    save_profile(taught, folder)
    for note in dict.fromkeys(notes):
        show_note(note)
    if as_json:
        show_json(runs_data(compared, taught, folder))
    else:
        show_results(*describe_runs(compared), *describe_runtimes(taught, by_runtime))
    named = " or ".join(f"--execution {runtime}" for runtime in by_runtime)
    show_note(f"used with --profile {folder}: by `planner check`, and by searches with {named}")
    show_written(f"wrote {folder}", as_json)


def _machine_of(
    rows: list[Row], given: Profile | None, name: str | None, out: Path | None
) -> tuple[Profile, Path]:
    """Return the profile that runs are priced on, with what it knew before, and where it is
    written; `given` is the one that was named.
    """
    from costmodel.table.rows.rows import machine_of
    from profiles import load_profile
    from profiles.catalog import calibrated_dir
    from profiles.store import PROFILE_FILE

    machines = dict.fromkeys(machine_of(row, given)[0].name for row in rows)
    if len(machines) > 1:
        raise PlannerError(
            f"runs on {' and on '.join(machines)} were given; calibrate one device at a time"
        )
    machine = given or load_profile(next(iter(machines)))
    folder = out or calibrated_dir(name, machine)
    if given is None and (folder / PROFILE_FILE).exists():
        known = load_profile(folder)
        if known.name != machine.name:
            raise PlannerError(
                f"{folder} is a profile of {known.name} and the runs are of {machine.name}; give "
                "another --out"
            )
        machine = known
    return machine, folder


def _compared(files: RunFiles, row: Row, machine: Profile, notes: list[str]) -> ComparedRun:
    """Return a run beside its price without what is known of others."""
    from costmodel.runtime_calibration import compared, without_runs
    from costmodel.table.rows.row_plan import RowPrices
    from costmodel.table.rows.rows import price_row

    prices = RowPrices()
    try:
        priced = price_row(row, prices, without_runs(machine))
    except PlannerError as error:
        raise PlannerError(f"{files.name}: {error}") from None
    notes += [f"{files.name}: assumed {each}" for each in priced.run.assumed]
    run, log = priced.run, files.log
    tokens = run.global_batch * run.sizes.seq_len

    def seconds(reading: float) -> float:
        if log.unit == "samples_per_s":
            return run.global_batch / reading
        return tokens / reading / run.gpus if log.unit == "tokens_per_s_per_device" else reading

    steady = log.steady(seconds)
    return compared(files.name, priced, log, steady, trace=files.trace, prices=prices)
