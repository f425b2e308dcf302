"""Which model families plan, and train as one process does: tiny random models of every name.

For each name of transformers' mappings a tiny configuration is made from the family's own by
shrinking its sizes, and written as a model file such as a user has. A family that trains in one
process is then searched and verified, at tp 2 x pp 2 and at dp 2, by the commands as a user
types them. What a command refuses in one line is told apart from what fails.

With --keep DIR results are kept there, beside the model files, and not made again without --again;
`python -m docs.build.families_page --keep DIR [--beside DIR]` writes docs/families.md of them.

A family would take 60 to 100 CPU seconds, most of them to import libraries in eight processes and
to capture the same model three times. So a process that has imported the libraries forks one for
each family, which imports the family's code, and that one forks the commands and their ranks; the
captures of a family (`tests.captures`) and the reach of the optimizer (`tests.reaches`) are made
once. --as-typed does without all this; the page compares with such results (--beside).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import importlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from benchmarks.harness import Result, benchmark, note
from benchmarks.runtime.families_models import MAPPINGS, write_model_file

LIMIT_S = 180
"""A command may take so many CPU seconds, of all its processes. On an undisturbed machine its time
by the clock is no more; on a shared one only CPU seconds say what the command itself takes."""

HANGS_S = 900
"""After so many seconds by the clock a command is ended whatever it has computed: it may hang."""

MOST_PARAMETERS = 20_000_000
"""A larger model is not tiny: seven processes have it in fp64, with gradients and AdamW's state."""

IMPORTED = (
    *("torch", "torch._dynamo", "torch.export", "torch.distributed", "torch.testing"),
    *("transformers.modeling_utils", "transformers.generation", "transformers.masking_utils"),
    *("transformers.models.llama.modeling_llama", "cli", "planner.worker"),
    *("planner.capture", "planner.runtime.proofs.verify", "search", "costmodel"),
    *(
        "torch.export._trace",
        "planner.capture.source.capture_cache",
        "planner.runtime.checkpoint.parts",
    ),
    *("planner.runtime.start.agent", "planner.runtime.start.launch", "commands.render.checks"),
    *(
        "commands.render.plans",
        "commands.common.measured",
        "search.report.explain",
        "costmodel.compare",
    ),
)
"""Imported before processes fork, so that each need not."""

UNDECIDED = "verify with --steps 1"
"""What `planner verify` says where rounding hides a difference: then that is done."""

LAYOUTS = {"tp2-pp2": ("--gpus=4", "--tp=2", "--pp=2"), "dp2": ("--gpus=2", "--dp=2")}


@dataclass
class Family:
    """What became of a family. Mutable: filled while it is tried.

    Attributes:
        family: its name in the mapping.
        kind: of the mapping.
        architecture: its class.
        trains: whether it trains in one process; if not, `why` says why not.
        outcome: by layout: "works", "refused", "differs", "fails" or "late".
        cpu_s: by layout and command, CPU seconds of all its processes.
        all_cpu_s: CPU seconds of all that was done for it.
        why: by layout, the last line that was said.
        day: it was tried on, as YYYY-MM-DD.
    """

    family: str
    kind: str
    architecture: str
    trains: bool = False
    outcome: dict[str, str] = field(default_factory=dict)
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict)
    all_cpu_s: float = 0.0
    why: dict[str, str] = field(default_factory=dict)
    day: str = ""

    @property
    def whole(self) -> str:
        """The worst of its outcomes."""
        order = ("fails", "late", "differs", "refused", "works")
        return min(self.outcome.values(), key=order.index) if self.outcome else "-"


def session_cpu_s(session: int) -> float:
    """Return the CPU seconds of a session's processes, and of those that they have waited for."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # after the name, which may hold blanks: state, parent, group, session, ...
            numbers = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(numbers[3]) == session:
                ticks += sum(int(each) for each in numbers[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (124: too late), output and CPU seconds."""

    code: int
    said: str
    cpu_s: float


def in_fork(work: Callable[[], int]) -> Ended:
    """Run work in a process of its own, for LIMIT_S CPU seconds at most."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        code = 3
        try:
            code = work()
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    os.close(write)
    os.set_blocking(read, False)
    said, ends = io.BytesIO(), time.monotonic() + HANGS_S
    code, cpu_s = None, 0.0
    while code is None:
        with contextlib.suppress(BlockingIOError):
            said.write(os.read(read, 1 << 16))
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            cpu_s = max(cpu_s, used.ru_utime + used.ru_stime)
            break
        cpu_s = max(cpu_s, session_cpu_s(child))
        if cpu_s > LIMIT_S or time.monotonic() > ends:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = 124
        else:
            time.sleep(0.25)
    with contextlib.suppress(BlockingIOError):
        while more := os.read(read, 1 << 16):
            said.write(more)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(read)
    return Ended(code, said.getvalue().decode(errors="replace"), round(cpu_s, 1))


def train(path: Path) -> int:
    """Train two steps in one process."""
    import torch

    from planner.capture.source.model_file import load_model_file

    source = load_model_file(path)
    module = source.build().train()
    size = sum(param.numel() for param in module.parameters())
    if size > MOST_PARAMETERS:
        print(f"not tried: the tiny model has {size / 1e6:.0f} million parameters")
        return 1
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for size in (2, 3):
        loss = module(**source.batch(size)).loss
        loss.backward()
        if not torch.isfinite(loss):
            print(f"the loss is {loss.item()}")
            return 1
        optimizer.step()
        optimizer.zero_grad()
    return 0


def typed(arguments: list[str]) -> int:
    """Become a command of planner, as typed."""
    os.execv(sys.executable, [sys.executable, "-m", "cli", *arguments])


def command(arguments: list[str]) -> int:
    """Run a command of planner, as typed, but that its ranks are forks of this process."""
    import cli
    from planner.runtime.start import agent

    agent.run_agent = forked_ranks
    return cli.run(arguments)


@dataclass(frozen=True)
class Failed:
    """When a rank failed, and how."""

    timestamp: float
    exitcode: int


@dataclass(frozen=True)
class Ranks:
    """What became of ranks: those that failed."""

    failed: dict[int, Failed]

    def is_failed(self) -> bool:
        return bool(self.failed)


def forked_ranks(command: Sequence[str], *, course: Any, ranks_here: int, **_: Any) -> Ranks:
    """Run a command's ranks as forks: each would take 7 CPU seconds to import its libraries."""
    from planner import worker

    arguments = list(command[command.index(worker.__name__) + 1 :])
    with socket.socket() as port:
        port.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port.getsockname()[1])}
    ranks = {}
    for rank in range(ranks_here):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
            place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks_here)
            os.environ.update(meeting | {name: str(value) for name, value in place.items()})
            atexit._clear()  # the parent's folders are the parent's to delete
            worker.main(arguments)
            os._exit(3)
        ranks[child] = rank
    failed: dict[int, Failed] = {}
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child, None)
        if rank is not None and status:
            failed[rank] = Failed(time.time(), os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    if failed:
        course.goes_on(failed)
    return Ranks(failed)


OUTCOMES = {0: "works", 1: "differs", 2: "refused", 124: "late"}


def try_family(
    kind: str, family: str, folder: Path, stop_at: str, run: Callable[[list[str]], int]
) -> Family:
    """Make a family's model, and plan and verify it, or stop before."""
    today = datetime.date.today().isoformat()
    result = Family(family=family, kind=kind, architecture="", day=today)
    try:
        path, result.architecture = write_model_file(kind, family, folder)
    except Exception as error:
        result.why["one process"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
        return result
    gc.freeze()  # with the family's code in it
    ended = in_fork(lambda: train(path))
    result.trains = ended.code == 0
    result.cpu_s["one process"] = {"train": ended.cpu_s}
    if ended.code:
        result.why["one process"] = last_line(ended.said)
        return result
    if stop_at == "train":
        return result
    plan = folder / f"{kind}_{family}.json"
    for label, flags in LAYOUTS.items():
        asked = ["--profile=h100-sxm5-80gb", "--global-batch=8", f"--out={plan}", *flags]
        result.cpu_s[label] = {}
        for arguments in (["search", str(path), *asked], ["verify", str(plan), str(path)]):
            ended = in_fork(lambda arguments=arguments: run(arguments))
            result.cpu_s[label][arguments[0]] = ended.cpu_s
            said = folder / f"{kind}_{family}.{label}.{arguments[0]}.log"
            said.write_text(ended.said)
            if ended.code or stop_at == "search":
                break
        if ended.code == 1 and UNDECIDED in " ".join(ended.said.split()):
            ended = in_fork(lambda: run(["verify", str(plan), str(path), "--steps=1"]))
        result.outcome[label] = OUTCOMES.get(ended.code, "fails")
        if "Traceback (most recent call last)" in ended.said:
            result.outcome[label] = "fails"
        if ended.code:
            result.why[label] = f"{arguments[0]}: {last_line(ended.said)}"
    return result


def try_in_fork(
    kind: str, family: str, folder: Path, stop_at: str, run: Callable[[list[str]], int]
) -> Family:
    """As `try_family`, in a process that this family's code and captures stay in."""
    kept = folder / f"{kind}_{family}.result"
    child = os.fork()
    if child == 0:
        try:
            with TemporaryDirectory() as captures:
                # nothing of an earlier code is taken for this one's
                os.environ["PLANNER_TEST_CAPTURES"] = captures
                os.environ["XDG_CACHE_HOME"] = captures
                result = try_family(kind, family, folder, stop_at, run)
            kept.write_text(json.dumps(asdict(result)))
        finally:
            os._exit(0)
    *_, used = os.wait4(child, 0)
    result = Family(**json.loads(kept.read_text()))
    result.all_cpu_s = round(used.ru_utime + used.ru_stime, 1)
    kept.write_text(json.dumps(asdict(result)))
    return result


def share_captures() -> None:
    """Let a family's processes make its captures once, and all the reach of an optimizer."""
    import torch

    import planner.capture.module
    import planner.runtime.state.optimizers.reach
    from planner.capture.source.model_file import local_modules
    from tests import captures, reaches

    torch.set_num_threads(1)
    local_modules()  # which keeps what it finds of the thousands of files imported
    planner.capture.capture_module = captures.capture_module
    planner.capture.module.capture_module = captures.capture_module
    reaches.measure_usual()
    planner.runtime.state.optimizers.reach._reach = reaches.reach_of


def last_line(said: str) -> str:
    """Return the line that says why, of what a command printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("compute NOT the same" in line for line in lines):
        return " ".join(said.split("\n\n")[0].split())[:600]
    told = [line for line in lines if line.startswith(("error", "planner", "Error"))]
    return (told or lines or ["nothing was said"])[-1][:600]


def names_of(kind: str) -> list[str]:
    """Return a mapping's names."""
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, MAPPINGS[kind]))


def results_in(folder: Path) -> list[Family]:
    """Return the results kept in a folder."""
    kept = sorted(folder.glob("*.result"))
    return [Family(**json.loads(each.read_text())) for each in kept]


def families_of(kinds: Sequence[str], only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield kinds and names, in the order of those that were given."""
    for kind in kinds:
        names = names_of(kind)
        yield from ((kind, family) for family in only or names if family in names)


@benchmark("families", quick={"only": ("llama",), "kind": ("causal",)})
def families(
    *,
    keep: Annotated[Path | None, "a folder for files and results"] = None,
    kind: tuple[str, ...] = tuple(MAPPINGS),
    only: Annotated[tuple[str, ...], "names of families"] = (),
    again: Annotated[bool, "also those with a result"] = False,
    stop_at: Literal["train", "search", "verify"] = "verify",
    as_typed: Annotated[bool, "each command in its own process"] = False,
) -> Result:
    for name in IMPORTED:
        importlib.import_module(name)
    if not as_typed:
        share_captures()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for which, family in families_of(kind, only):
            kept = folder / f"{which}_{family}.result"
            if kept.exists() and not again:
                result = Family(**json.loads(kept.read_text()))
            else:
                run = typed if as_typed else command
                result = try_in_fork(which, family, folder, stop_at, run)
            rows.append(
                {
                    "kind": which,
                    "family": family,
                    "outcome": result.whole if result.trains else "does not train",
                    "cpu_s": result.all_cpu_s,
                    "why": next(iter(result.why.values()), "")[:260],
                }
            )
            note(rows[-1])
    counts = Counter(row["outcome"] for row in rows)
    return Result(rows, [str(dict(counts))], failed=bool(counts["fails"] + counts["differs"]))
