"""The `planner` command: parse, load files, call one function of a room, save, print.

Every import of a room is made inside its command, so that `planner --help` answers at once
and `planner show` never loads torch. Results go to stdout; progress, notes and errors to
stderr. Exit codes: 0 done, 1 a check failed (`verify`, `profile --check`), 2 bad input, said
in one line; 130 interrupted. A traceback means a mistake of ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import PlannerError

if TYPE_CHECKING:
    from costmodel import JobSeconds, Timeline
    from planner.plan import Precision
    from planner.timeline import RankTimeline
    from profiles import Profile
    from search import SearchRequest

app = typer.Typer(
    name="planner",
    help="Find, prove and run the fastest way to train a PyTorch model on a cluster.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Progress = Callable[[float, str], None]
"""Called by long work with the fraction done (0..1) and what is being done."""

ModelFile = Annotated[Path, typer.Argument(help="A .py file with model() and batch(size).")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `planner search`.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(help="Shipped profile name or profile directory. Default: this machine's own."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda. Default: cuda if there is one, else cpu.")
]

GpusOption = Annotated[int, typer.Option(help="Devices to use, all of them.")]
GlobalBatchOption = Annotated[
    int | None, typer.Option(help="Samples per step. Default: 8 per device.")
]
MemoryLimitOption = Annotated[
    float | None, typer.Option(help="GiB per device. Default: what the profile allows.")
]
DpOption = Annotated[int | None, typer.Option(help="Fix the data-parallel degree.")]
TpOption = Annotated[int | None, typer.Option(help="Fix the tensor-parallel degree.")]
PpOption = Annotated[int | None, typer.Option(help="Fix the number of pipeline ranks.")]
VppOption = Annotated[int | None, typer.Option(help="Fix the stages per pipeline rank.")]
CpOption = Annotated[int | None, typer.Option(help="Fix the context-parallel degree.")]
MicrobatchSizeOption = Annotated[int | None, typer.Option(help="Fix samples per microbatch.")]
ScheduleOption = Annotated[str | None, typer.Option(help="Fix the pipeline schedule.")]
ZeroOption = Annotated[int | None, typer.Option(help="Fix the ZeRO stage: 0, 1, 2 or 3.")]
RecomputeOption = Annotated[
    str | None, typer.Option(help="Fix recompute: none, selective or full.")
]
BalanceOption = Annotated[
    str | None, typer.Option(help="Fix the blocks of each stage, such as 1,3.")
]
PrecisionOption = Annotated[
    str, typer.Option(help="model: the model's own dtypes; bf16: with fp32 master weights.")
]
TraceOption = Annotated[
    Path | None, typer.Option(help="Also write a trace for chrome://tracing or ui.perfetto.dev.")
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(help="Fix where parameters lie, such as 'layers.*.up: S(0)@tp'. Repeatable."),
]


def main() -> None:
    """Entry point of the `planner` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; a user's mistake becomes one stderr line."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="planner", standalone_mode=False)
    except PlannerError as error:
        return _refuse(str(error))
    except OSError as error:  # a full disk, a missing folder, no permission
        if error.filename is None:
            raise
        return _refuse(f"{error.filename}: {error.strerror}; name another file or folder")
    except Exception as error:
        # Usage errors come from the click that typer uses, its own copy in newer versions;
        # what marks them in all versions is format_message.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "planner"
        return _refuse(f"{error.format_message().rstrip('.')}; see {command} --help")
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    print("planner: " + " ".join(message.split()), file=sys.stderr)
    return 2


@app.command()
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
) -> int:
    """Measure this machine, once; run again to resume.

    The same command goes on where it was stopped. `planner profile show DIR` prints what a
    profile holds.
    """
    import profiles as room

    if check is not None:
        problems = room.check_profile(check)
        print("\n".join(problems) or f"{check} is a complete profile")
        return 1 if problems else 0
    if models and str(models[0]) == "show":
        if len(models) != 2:
            raise PlannerError("profile show takes one profile directory or shipped name")
        loaded = room.load_profile(str(models[1]))
        _print(*room.describe_profile(loaded))
        if plots is not None:
            room.write_plots(loaded, plots)
            print(f"wrote {plots}")
        return 0
    device = device or _found_device()
    folder = out or room.own_profile_dir(device)
    with _progress("profiling") as progress:
        measured = room.measure_profile(
            folder,
            nproc=nproc or gpus or _num_devices(device),
            device=device,
            models=[_graph(model) for model in models or ()],
            gpus=gpus,
            budget_s=None if budget is None else _seconds(budget),
            progress=progress,
        )
    if measured is None:  # one of several processes that a launcher started; rank 0 tells
        return 0
    _print(room.describe_profile(measured)[0])
    print(f"wrote {folder}; see all of it with: planner profile show {folder}")
    return 0


def _found_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _num_devices(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 2


@app.command()
def search(
    model: ModelFile,
    gpus: GpusOption,
    profile: ProfileOption = None,
    global_batch: GlobalBatchOption = None,
    memory_limit: MemoryLimitOption = None,
    out: Annotated[Path, typer.Option(help="Where to write the plan.")] = Path("plan.json"),
    dp: DpOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    vpp: VppOption = None,
    cp: CpOption = None,
    microbatch_size: MicrobatchSizeOption = None,
    schedule: ScheduleOption = None,
    zero: ZeroOption = None,
    recompute: RecomputeOption = None,
    balance: BalanceOption = None,
    precision: PrecisionOption = "model",
    pin: PinOption = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(help="Rule a choice out, such as schedule=zb_v or tp=8. Repeatable."),
    ] = None,
    solver: Annotated[
        str, typer.Option(help="Of stage boundaries: dp, recursive, cpsat or brute_force.")
    ] = "dp",
    pareto: Annotated[
        Path | None, typer.Option(help="Also write plans that trade time for memory, as JSON.")
    ] = None,
    gap: Annotated[
        float, typer.Option(help="Stop when proved within this fraction of the best.")
    ] = 0.0,
    time_limit: Annotated[
        str | None, typer.Option(help="Stop after this time, such as 30s, and say how sure.")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep answers, and use kept ones.")
    ] = True,
) -> None:
    """Find the fastest plan that fits, and write it."""
    from planner.batch_statistics import cut_batch_message
    from planner.plan import save_plan
    from search import find_pareto, find_plan_once
    from search.describe import describe_pareto, describe_result

    request = replace(
        _request(
            model=model,
            gpus=gpus,
            global_batch=global_batch,
            memory_limit=memory_limit,
            dp=dp,
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=cp,
            microbatch_size=microbatch_size,
            schedule=schedule,
            zero=zero,
            recompute=recompute,
            balance=_balance(balance),
            precision=precision,
        ),
        forbid=tuple(map(_forbidden, forbid or ())),
        solver=solver,
        max_gap=gap,
        time_limit_s=None if time_limit is None else _seconds(time_limit),
    )
    cluster, note = _profile(profile)
    with _progress("searching") as progress:
        graph = _graph(model, request.precision)
        request = replace(request, pins=_pins(graph, pin or ()))
        result = find_plan_once(graph, cluster, request, progress=progress, use_cache=cache)
        if result.plan is None:
            raise PlannerError(result.reasons[0])
        points = find_pareto(graph, cluster, request, progress=progress) if pareto else ()
    save_plan(result.plan, out)
    _note(note)
    _note(cut_batch_message(graph, result.plan))
    _print(*describe_result(result))
    print(f"wrote {out}")
    if pareto:
        pareto.write_text(json.dumps([point.to_dict() for point in points], indent=1) + "\n")
        _print(describe_pareto(points))
        print(f"wrote {pareto}")


@app.command()
def show(
    plan: PlanFile,
    model: Annotated[
        Path | None, typer.Argument(help="The model file, to name blocks and parameters.")
    ] = None,
) -> None:
    """Print what a plan decides and should cost."""
    from planner.describe import describe_plan
    from planner.plan import load_plan

    loaded = load_plan(plan)
    graph = None if model is None else _graph(model, loaded.precision)
    _print(*describe_plan(loaded, graph))


@app.command()
def why(
    model: ModelFile,
    gpus: GpusOption,
    profile: ProfileOption = None,
    global_batch: GlobalBatchOption = None,
    memory_limit: MemoryLimitOption = None,
    dp: DpOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    vpp: VppOption = None,
    cp: CpOption = None,
    microbatch_size: MicrobatchSizeOption = None,
    schedule: ScheduleOption = None,
    zero: ZeroOption = None,
    recompute: RecomputeOption = None,
    balance: BalanceOption = None,
    precision: PrecisionOption = "model",
    pin: PinOption = None,
) -> None:
    """Say why your choices are refused, or slower."""
    from search.describe import describe_comparison
    from search.explain import compare_choices

    request = _request(
        model=model,
        gpus=gpus,
        global_batch=global_batch,
        memory_limit=memory_limit,
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        microbatch_size=microbatch_size,
        schedule=schedule,
        zero=zero,
        recompute=recompute,
        balance=_balance(balance),
        precision=precision,
    )
    cluster, note = _profile(profile)
    with _progress("comparing") as progress:
        graph = _graph(model, request.precision)
        request = replace(request, pins=_pins(graph, pin or ()))
        comparison = compare_choices(graph, cluster, request, progress)
    _note(note)
    _print(*describe_comparison(comparison))


@app.command()
def estimate(
    plan: Annotated[Path | None, typer.Argument(help="A plan made by `planner search`.")] = None,
    model: Annotated[Path | None, typer.Argument(help="The model file of the plan.")] = None,
    profile: ProfileOption = None,
    batch: Annotated[
        Path | None, typer.Option(help="Instead of PLAN MODEL: a CSV of runs, one a row.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --batch: the CSV to write, with predictions added.")
    ] = None,
) -> None:
    """Predict a plan's step time and memory, in parts."""
    if batch is not None or out is not None:
        if batch is None or out is None or plan is not None or profile is not None:
            raise PlannerError("give PLAN and MODEL, or --batch IN.csv --out OUT.csv, not both")
        _estimate_rows(batch, out)
        return
    if plan is None or model is None:
        raise PlannerError("give PLAN and MODEL, or --batch IN.csv --out OUT.csv")
    from costmodel import estimate as estimate_plan
    from planner.describe import describe_estimate
    from planner.plan import load_plan, validate_model

    loaded = load_plan(plan)
    cluster, note = _profile(profile)
    with _progress("estimating"):
        graph = _graph(model, loaded.precision)
        validate_model(loaded, graph)
        result = estimate_plan(graph, cluster, loaded)
    _note(note)
    _print(*describe_estimate(result.to_dict(), cluster=cluster.name))


def _estimate_rows(source: Path, target: Path) -> None:
    from costmodel.rows import estimate_file

    with _progress("estimating"):
        num_rows, num_predicted = estimate_file(source, target)
    print(f"wrote {target}: {num_predicted} of {num_rows} rows predicted, the rest say why not")


@app.command()
def simulate(
    plan: PlanFile,
    model: ModelFile,
    profile: ProfileOption = None,
    trace: TraceOption = None,
) -> None:
    """Play a plan's timetable: who works and waits when."""
    from costmodel.compare import as_rank_timelines
    from costmodel.describe import describe_timeline

    timeline, seconds, _, note = _simulate(plan, model, profile)
    _note(note)
    _print(*describe_timeline(timeline, seconds))
    _save_trace(trace, predicted=as_rank_timelines(timeline))


@app.command()
def dryrun(
    plan: PlanFile,
    model: ModelFile,
    rank: Annotated[int, typer.Option(help="The rank to look at.")] = 0,
) -> None:
    """Run one rank on fake tensors: its memory, job by job."""
    from planner.describe import describe_dry_run
    from planner.model_file import load_model_file
    from planner.plan import load_plan, validate_model
    from planner.runtime.dryrun import dry_run

    loaded = load_plan(plan)
    with _progress("dry run") as progress:
        progress(0.0, "capturing the model")
        graph = _graph(model, loaded.precision)
        validate_model(loaded, graph)
        progress(0.5, f"running rank {rank} on fake tensors")
        run = dry_run(loaded, graph, load_model_file(model).build, rank=rank)
    _print(*describe_dry_run(run))


@app.command()
def verify(
    plan: PlanFile,
    model: ModelFile,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    device: DeviceOption = None,
) -> int:
    """Prove that a plan computes what one process does.

    Trains a few steps both ways in fp64 and exits with 1 if they differ by more than 1e-9.
    """
    from planner.describe import describe_verification
    from planner.plan import load_plan, validate_model
    from planner.runtime.verify import verify as verify_plan

    loaded = load_plan(plan)
    with _progress("verifying") as progress:
        progress(0.0, "capturing the model")
        validate_model(loaded, _graph(model, loaded.precision))
        try:
            report = verify_plan(plan, model, steps=steps, device=device, progress=progress)
        except RuntimeError as error:  # a rank failed and has shown its traceback
            _note(f"planner: {error}")
            return 1
    _print(*describe_verification(report))
    return 0 if report.passed else 1


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
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
    from planner.runtime.launch import launch as launch_ranks

    return launch_ranks(
        plan,
        script,
        arguments or [],
        device,
        num_nodes=num_nodes,
        rendezvous=rendezvous,
        timeline=timeline,
    )


@app.command()
def timeline(
    folder: Annotated[Path, typer.Argument(help="Made by `planner launch --timeline FOLDER`.")],
    trace: TraceOption = None,
) -> None:
    """Report a recorded run, and make one trace of it."""
    from planner.describe import describe_timeline
    from planner.timeline import load_timeline

    measured = load_timeline(folder)
    _print(*describe_timeline(measured))
    _save_trace(trace, measured=measured)


@app.command()
def compare(
    plan: PlanFile,
    model: ModelFile,
    folder: Annotated[Path, typer.Argument(help="Made by `planner launch --timeline FOLDER`.")],
    profile: ProfileOption = None,
    trace: TraceOption = None,
) -> None:
    """Set the prediction beside a recorded run."""
    from costmodel.compare import as_rank_timelines, compare_run
    from costmodel.describe import describe_run
    from planner.timeline import load_timeline

    measured = load_timeline(folder)
    timeline, _, step_s, note = _simulate(plan, model, profile)
    comparison = compare_run(timeline, step_s, measured)
    _note(note)
    _print(*describe_run(comparison))
    _save_trace(trace, predicted=as_rank_timelines(timeline), measured=measured)


def _request(
    *,
    model: Path,
    gpus: int,
    global_batch: int | None,
    memory_limit: float | None,
    **choices: Any,
) -> SearchRequest:
    from search import SearchRequest

    return SearchRequest(
        num_devices=gpus,
        global_batch=8 * gpus if global_batch is None else global_batch,
        memory_limit_bytes=_bytes_of_gib(memory_limit),
        model_file=str(model),
        **choices,
    )


def _balance(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    counts = text.split(",")
    if not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise PlannerError(
            f"--balance {text} is not understood; write the number of blocks of each stage, in "
            "order, such as 1,3"
        )
    return tuple(map(int, counts))


def _forbidden(text: str) -> tuple[str, str]:
    choice, equals, value = text.partition("=")
    choices = ("dp", "tp", "pp", "vpp", "cp", "microbatch_size", "schedule", "zero", "recompute")
    if not equals or choice.replace("-", "_") not in choices:
        raise PlannerError(
            f"--forbid {text} is not understood; write CHOICE=VALUE, with a choice of "
            + ", ".join(choices)
        )
    return choice.replace("-", "_"), value


def _pins(graph: Any, texts: Sequence[str]) -> tuple[tuple[int, str, str], ...]:
    """Return pins as (class index, parameter name in its program, placement)."""
    from planner.sharding.pins import class_pins, parse_pin

    by_class = class_pins(graph, [parse_pin(text) for text in texts])
    return tuple(
        (index, name, str(placement))
        for index, names in by_class.items()
        for name, placement in names.items()
    )


def _graph(model: Path, precision: Precision = "model") -> Any:
    from planner.capture_cache import load_graph

    return load_graph(model, precision=precision)


def _profile(name: str | None, device: str | None = None) -> tuple[Profile, str]:
    """Load the named profile, or choose one; with a line for the user if it is not his own.

    The line is for after the work: a refused command says one thing only.
    """
    import profiles

    if name is not None:
        return profiles.load_profile(name), ""
    return profiles.default_profile(device)


def _simulate(
    plan: Path, model: Path, profile: str | None
) -> tuple[Timeline, JobSeconds, float, str]:
    """Return the predicted timeline, its jobs' seconds, the whole step's, and a note."""
    from costmodel import CostCache
    from costmodel import estimate as estimate_plan
    from costmodel.estimate import plan_job_seconds
    from planner.plan import load_plan, validate_model

    loaded = load_plan(plan)
    cluster, note = _profile(profile)
    with _progress("simulating"):
        graph = _graph(model, loaded.precision)
        validate_model(loaded, graph)
        costs = CostCache(graph, cluster)
        result = estimate_plan(graph, cluster, loaded, costs=costs)
        return result.timeline, plan_job_seconds(loaded, costs), result.step_s, note


def _bytes_of_gib(gib: float | None) -> int | None:
    from planner.units import GIB

    if gib is None:
        return None
    if gib <= 0:
        raise PlannerError(f"--memory-limit {gib:g} was given; it is GiB per device, above 0")
    return round(gib * GIB)


def _seconds(text: str) -> float:
    """Parse a duration: seconds, or a number followed by s, m or h."""
    factors = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in factors else (text, "s")
    try:
        value = float(number) * factors[unit]
    except ValueError:
        value = 0.0
    if value <= 0:
        raise PlannerError(f"duration {text!r} is not a time; write it like 90s, 5m or 1h")
    return value


@contextmanager
def _progress(title: str) -> Iterator[Progress]:
    """Show a bar on stderr while the body runs; yields the function that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[doing]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None, doing="")  # pulses until something moves it

        def move(fraction: float, doing: str) -> None:
            bar.update(task, total=1.0, completed=fraction, doing=doing)

        yield move


def _note(text: str | None) -> None:
    if text:
        print(text, file=sys.stderr)


def _print(*renderables: Any) -> None:
    import os

    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=120)  # a file or a log has room
    for renderable in renderables:
        console.print(renderable)


def _save_trace(path: Path | None, **timelines: Sequence[RankTimeline]) -> None:
    if path is None:
        return
    from planner.timeline import save_trace

    save_trace(path, timelines)
    print(f"wrote {path}; open it in chrome://tracing or ui.perfetto.dev")


if __name__ == "__main__":
    main()
