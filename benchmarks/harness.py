"""One harness of all benchmarks: the registry and its command, turns, ranks, what is written.

    @benchmark("delays", quick={"steps": 2})
    def delays(*, steps: Annotated[int, "steps of a case"] = 5) -> Result: ...

registers a benchmark of the file's name. Its keyword arguments are the command's options: a bool
is a flag, a tuple takes several values, a Literal is a choice. `quick` are the arguments with which
it takes its smallest model for a few steps, and ends within 20 seconds: a slow test runs each so.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import inspect
import io
import json
import os
import pickle
import platform
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from planner.errors import PlannerError

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("published", "published/layouts", "published/parts", "searches", "machine", "runtime")

# ---------------------------------------------------------------------------------- benchmarks


class Result:
    """What a benchmark found: a mapping of figures by row, and sentences about all of them.

    Rows may be given as dataclasses. `failed` makes the command's exit code 1.
    """

    def __init__(
        self, rows: Sequence[Any], notes: Sequence[str] = (), *, failed: bool = False
    ) -> None:
        self.rows: list[dict[str, Any]] = [asdict(r) if is_dataclass(r) else dict(r) for r in rows]  # type: ignore[arg-type]
        self.notes = tuple(notes)
        self.failed = failed

    @property
    def text(self) -> str:
        """The rows as a table, and the notes."""
        return "\n".join([*table(self.rows), *self.notes])


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A registered benchmark."""

    name: str
    run: Callable[..., Result]
    quick: Mapping[str, Any]
    """Arguments of a run that ends within 20 seconds."""
    doc: str
    """The docstring of its module."""

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.doc.partition("\n")[0]

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of its arguments, which leaves out what is not given."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.name}",
            description=self.doc,
            epilog="Of every benchmark: --quick, --json, --out FILE.json or FILE.csv.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        hints = typing.get_type_hints(self.run, include_extras=True)
        for name, parameter in inspect.signature(self.run).parameters.items():
            _add_option(parser, name, hints[name], parameter.default)
        return parser


BENCHMARKS: dict[str, Benchmark] = {}
"""Those whose modules are imported, by name."""


def benchmark(
    name: str, *, quick: Mapping[str, Any]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a function as the benchmark of its file."""

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        unknown = quick.keys() - inspect.signature(function).parameters.keys()
        if unknown:
            raise TypeError(f"{name} has no arguments {sorted(unknown)}")
        doc = sys.modules[function.__module__].__doc__ or ""
        BENCHMARKS[name] = Benchmark(name=name, run=function, quick=quick, doc=doc)
        return function

    return register


def find_benchmark(name: str) -> Benchmark:
    """Import the file of that name; raise PlannerError where it is no benchmark."""
    for room in ROOMS:
        if (Path(__file__).parent / room / f"{name}.py").exists():
            importlib.import_module(_module(room, name))
    if name not in BENCHMARKS:
        raise PlannerError(f"no benchmark is called {name}; `python -m benchmarks` lists them")
    return BENCHMARKS[name]


def all_benchmarks() -> list[Benchmark]:
    """Import every file of the rooms, and return the benchmarks, room by room."""
    for room in ROOMS:
        for file in sorted((Path(__file__).parent / room).glob("*.py")):
            importlib.import_module(_module(room, file.stem))
    return list(BENCHMARKS.values())


def _module(room: str, name: str) -> str:
    return ".".join(("benchmarks", *room.split("/"), name))


# ------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """List the benchmarks, or run one; return the exit code."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("name", nargs="?")
    first.add_argument("--quick", action="store_true")
    first.add_argument("--json", action="store_true")
    first.add_argument("--out", type=Path)
    options, others = first.parse_known_args(arguments)
    if options.name is None:
        for found in all_benchmarks():
            print(f"{found.name:20}{found.summary}")
        print("\npython -m benchmarks NAME [--quick] [--json] [--out FILE.json|FILE.csv] [--help]")
        return 0
    try:
        found = find_benchmark(options.name)
        given = vars(found.parser().parse_args(others))
        chosen = (dict(found.quick) if options.quick else {}) | given
        result = found.run(**chosen)
    except (OSError, PlannerError) as error:
        print(error, file=sys.stderr)
        return 2
    record = {"benchmark": found.name, **machine(), "arguments": chosen, "rows": result.rows}
    record["notes"] = result.notes
    as_json = json.dumps(record, indent=1, default=str)
    if options.out:
        is_csv = options.out.suffix == ".csv"
        options.out.write_text(csv_of(result.rows) if is_csv else as_json + "\n")
    print(as_json if options.json else result.text)
    return int(result.failed)


def _add_option(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any) -> None:
    """Add the option of a function's argument."""
    told = ""
    if get_origin(hint) is Annotated:
        hint, told = get_args(hint)
    if get_origin(hint) is types.UnionType:  # or None, its default
        (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
    shape: dict[str, Any] = {"type": hint}
    if hint is bool:
        shape = {"action": "store_true"}
    elif get_origin(hint) is tuple:
        shape = {"type": get_args(hint)[0], "nargs": "+"}
    elif get_origin(hint) is Literal:
        shape = {"choices": get_args(hint)}
    if hint is not bool and default not in (None, ()):
        value = " ".join(map(str, default)) if isinstance(default, tuple) else default
        told = f"{told} ({value})".strip()
    parser.add_argument(f"--{name.replace('_', '-')}", **shape, help=told.replace("%", "%%"))


# --------------------------------------------------------------------------- what is written


def machine() -> dict[str, str]:
    """Return what a measurement is of: the day, the processor, its cores and load, libraries."""
    cpu = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{(models or [cpu])[0]}, {os.cpu_count()} cores, load {load}",
        "python": platform.python_version(),
    }
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].__version__
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines of a table whose columns are the keys of the rows."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [any(isinstance(row.get(name), int | float) for row in rows) for name in names]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return str(value)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table of comma-separated values."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def note(text: object) -> None:
    """Say how far a benchmark is."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- turns and processes


def in_turns(
    sides: Mapping[Any, Callable[[], Any]], turns: int, *, warm_up: int = 0
) -> dict[Any, list[Any]]:
    """Return what each side finds in each turn after the warm-up.

    Sides take turns, first to last and then last to first, so that whatever else the machine does
    hits all of them, and being first does not count.
    """
    found: dict[Any, list[Any]] = {side: [] for side in sides}
    for turn in range(warm_up + turns):
        for side in reversed(sides) if turn % 2 else sides:
            value = sides[side]()
            if turn >= warm_up:
                found[side].append(value)
    return found


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function finds in a new interpreter, whose memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Return what `function(*args)` returns on each rank of a world."""
    return on_worlds(world_size, function, [args], backend=backend)[0]


def on_worlds(
    world_size: int,
    function: Callable[..., Any],
    each: Sequence[tuple[Any, ...]],
    *,
    backend: str = "gloo",
) -> list[list[Any]]:
    """Return what a function returns on each rank of several worlds at once, with each's arguments.

    Ranks are forks of this process, with one thread. A failure of one ends all, with its traceback.
    """
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Of the fork of a process with threads: these are of pools that ranks do not use.
        warnings.simplefilter("ignore")
        torch.multiprocessing.start_processes(
            _rank,
            (world_size, folder, function, each, backend),
            nprocs=world_size * len(each),
            start_method="fork",
        )
        return [
            [
                pickle.loads((Path(folder) / f"{world}-{rank}").read_bytes())
                for rank in range(world_size)
            ]
            for world in range(len(each))
        ]


def _rank(
    index: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    each: Sequence[tuple[Any, ...]],
    backend: str,
) -> None:
    import torch
    import torch.distributed as dist

    world, rank = divmod(index, world_size)
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    found = function(*each[world])
    (Path(folder) / f"{world}-{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
