"""Whether searches keep their time: large blocks, the first plan, `--time-limit`.

blocks   odd shapes of up to 5,000 ops: capture, layouts, the whole search, tp 1 to 8 on 8 devices
first    the whole search, and when it had its first plan to show, for each solver
limit    `planner search --time-limit`: how long the command goes on past it (capture apart)

Each row is of a process of its own, on one core, in seconds of CPU and by the clock. Models are
captured before, and kept, as by `search`.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from benchmarks.harness import Result, benchmark, in_own_process, note
from benchmarks.searches.cases import CASES, TINY, cached_graph, kept_graph, peak_rss_mib

PROFILE = "h100-sxm5-80gb"
SOLVERS = ("dp", "recursive", "ilp")


# ---------------------------------------------------------------------------------------
# Blocks of odd shapes

SIZES = (500, 1000, 2000, 5000)
SHAPES = ("chain", "branches", "fan_in", "matmuls", "tangle")
WIDTH, POSITIONS = 1024, 512


def block_of(shape: str, num_ops: int):
    """Return a module whose one block has about so many ops."""
    import torch
    from torch import nn

    width = WIDTH

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            few = {"matmuls": num_ops // 4, "tangle": num_ops // 10}.get(shape, 2)
            self.weights = nn.ParameterList([nn.Parameter(torch.empty(width, width))] * 0)
            for _ in range(few):
                self.weights.append(nn.Parameter(torch.empty(width, width)))

        def forward(self, x):
            w = self.weights
            x = x @ w[0]
            return getattr(self, shape)(x) @ w[1]

        def chain(self, x):
            """Elementwise ops, one after the other."""
            for step in range(num_ops // 3):
                x = torch.tanh(x * 1.5 + step)
            return x

        def branches(self, x):
            """Eight branches of four ops that are added up, again and again."""
            for _ in range(num_ops // 40):
                parts = [torch.tanh(torch.relu(x * (i + 1.5)) + i).exp() for i in range(8)]
                x = sum(parts[1:], start=parts[0])
            return x

        def fan_in(self, x):
            """A hundred products of one tensor that one op takes, again and again."""
            for _ in range(max(1, num_ops // 200)):
                x = torch.stack([(x * (i + 1.5)).tanh() for i in range(100)]).sum(0)
            return x

        def matmuls(self, x):
            """Residual layers."""
            for weight in list(self.weights)[2:]:
                x = x + torch.relu(x @ weight) * 0.5
            return x

        def tangle(self, x):
            """Each op takes two of the last ten tensors; a tenth of them are products."""
            import random

            draw, made = random.Random(0), [x]
            weights = iter(list(self.weights)[2:])
            for step in range(num_ops - 2):
                a, b = draw.choice(made[-10:]), draw.choice(made[-10:])
                weight = next(weights, None) if step % 10 == 0 else None
                made.append(a @ weight if weight is not None else a * b)
            return sum(made[-10:])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, x, y):
            return ((self.layers[0](x) - y) ** 2).mean()

    with torch.device("meta"):
        return Model().to(torch.bfloat16)


def captured_block(shape: str, num_ops: int):
    """Return a block's graph, captured on the meta device."""
    import torch

    from planner.capture import capture_module

    def batch(size: int) -> tuple:
        made = torch.zeros(size, POSITIONS, WIDTH, dtype=torch.bfloat16, device="meta")
        return made, made

    return capture_module(block_of(shape, num_ops), batch(2), batch(3), name=f"{shape}{num_ops}")


def measure_block(shape: str, num_ops: int, solver: str = "dp") -> dict:
    """Search for 8 devices, tp 1 to 8, and time what places ops."""
    from planner.deadline import within
    from profiles import load_profile
    from search import SearchRequest, find_plan
    from search.op_layout.layouts import SizedLayouts

    graph = kept_graph(f"{shape}-{num_ops}", lambda: captured_block(shape, num_ops))
    laid_out = Clock()
    for name in ("fastest", "worth_pricing", "leanest", "least_seconds"):
        answer = getattr(SizedLayouts, name)  # a cached property
        answer.func = laid_out.around(answer.func)
    request = SearchRequest(num_devices=8, global_batch=64, solver=solver)
    whole, silence = Clock(), Silence()
    with whole.running(), within(1e9, clock=silence):
        result = find_plan(graph, load_profile(PROFILE), request)
    assert result.certificate is not None
    return {
        "ops": sum(len(program.ops) for program in graph.classes),
        **laid_out.told("layouts"),
        **whole.told("search"),
        "gap": result.certificate.gap,
        "placements_gap": result.certificate.placements_gap,
        "placed_by": dict(result.certificate.proved_by)["placements in blocks"],
        **silence.told(),
        "peak_rss_mib": peak_rss_mib(),
    }


class Clock:
    """Seconds of what runs under it, by the clock and of CPU. Mutable."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.depth = 0

    def start(self) -> None:
        """Begin to count."""
        self.depth += 1
        if self.depth == 1:
            self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Count what has run since, once where it is nested."""
        self.depth -= 1
        if self.depth == 0:
            self.wall_s += time.perf_counter() - self._began[0]
            self.cpu_s += time.process_time() - self._began[1]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what runs inside."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def around(self, function):
        """Return the function, timed."""

        def timed(*args, **kwargs):
            with self.running():
                return function(*args, **kwargs)

        return timed

    def told(self, name: str) -> dict:
        """Return both as fields of a row."""
        return {f"{name}_s": round(self.wall_s, 2), f"{name}_cpu_s": round(self.cpu_s, 2)}


class Silence:
    """A clock for `planner.deadline`: how long a search runs between two looks at it. Mutable."""

    def __init__(self) -> None:
        self.longest_s, self.where, self._last_s = 0.0, "", time.process_time()

    def __call__(self) -> float:
        now = time.process_time()
        if now - self._last_s > self.longest_s:
            self.longest_s = now - self._last_s
            frames = traceback.extract_stack(limit=9)[:-2]
            self.where = " > ".join(f"{Path(f.filename).stem}.{f.name}" for f in frames)
        self._last_s = time.process_time()
        return time.perf_counter()

    def told(self) -> dict:
        """Return the longest as fields of a row."""
        return {"silence_cpu_s": round(self.longest_s, 2), "silence_until": self.where}


# ---------------------------------------------------------------------------------------
# The first plan, and limits


@dataclass(frozen=True, kw_only=True)
class Question:
    """A case of `benchmarks/search.py` with less memory and choices fixed."""

    case: str
    memory_limit_gib: float | None = None
    fixed: tuple[tuple[str, int | str], ...] = ()

    @property
    def options(self) -> list[str]:
        """The command line's."""
        case = CASES[self.case]
        found = ["--gpus", str(case.gpus), "--global-batch", str(case.global_batch)]
        if self.memory_limit_gib:
            found += ["--memory-limit", f"{self.memory_limit_gib}"]
        for name, value in self.fixed:
            found += [f"--{name.replace('_', '-')}", str(value)]
        return found


QUESTIONS = {
    "70b@64": Question(case="llama3-70b@64"),
    "70b@64, 24 GiB": Question(case="llama3-70b@64", memory_limit_gib=24),
    "70b@64, own meshes": Question(case="llama3-70b@64", fixed=(("meshes", "own"),)),
    "70b@64, 16 GiB": Question(case="llama3-70b@64", memory_limit_gib=16),
    "405b@16384": Question(case="llama3-405b@16384"),
    "405b@16384, 12 GiB": Question(case="llama3-405b@16384", memory_limit_gib=12),
    "405b@16384, 4 GiB": Question(case="llama3-405b@16384", memory_limit_gib=4),
    "1000 layers": Question(case="1000-layer@512"),
    "1000 layers, 6 GiB": Question(case="1000-layer@512", memory_limit_gib=6),
    "1000 layers, pp 8, 6 GiB": Question(
        case="1000-layer@512", memory_limit_gib=6, fixed=(("pp", 8),)
    ),
    "1000 layers, pp 16, 3 GiB": Question(
        case="1000-layer@512", memory_limit_gib=3, fixed=(("pp", 16),)
    ),
}


def question_of(name: str) -> Question:
    """Return a question by its name, or by that of a case alone."""
    return QUESTIONS.get(name) or Question(case=name)


LIMITS_S = (5, 10, 30, 60)


def measure_first(name: str, solver: str) -> dict:
    """Search without a limit, and note when there was a plan to show."""
    from planner.deadline import within
    from planner.units import GIB
    from profiles import load_profile
    from search import SearchRequest, find_plan
    from search.find_plan import FirstLook

    question = question_of(name)
    case = CASES[question.case]
    graph = cached_graph(question.case, case)
    limit = question.memory_limit_gib
    request = SearchRequest(
        num_devices=case.gpus,
        global_batch=case.global_batch,
        memory_limit_bytes=int(limit * GIB) if limit else None,
        solver=solver,
        **dict(question.fixed),
    )
    whole, first = Clock(), {}
    began, cpu = time.perf_counter(), time.process_time()

    def note(found) -> None:
        first["first_s"] = round(time.perf_counter() - began, 2)
        first["first_cpu_s"] = round(time.process_time() - cpu, 2)
        first["first_gap"] = found.certificate.gap
        first["first_step_s"] = found.plan.estimate["step_s"]

    look = FirstLook(after_s=0.0, show=note)
    silence = Silence()
    try:
        with whole.running(), within(1e9, clock=silence):
            result = find_plan(graph, load_profile(PROFILE), request, first_look=look)
    except Exception as error:  # told in the row
        return {**first, **whole.told("search"), "failed": f"{type(error).__name__}: {error}"}
    proof, plan = result.certificate, result.plan
    return {
        **first,
        **whole.told("search"),
        **silence.told(),
        "peak_rss_mib": peak_rss_mib(),
        **({"gap": proof.gap, "simulated": proof.evaluated} if proof else {}),
        **({"step_s": plan.estimate["step_s"]} if plan else {"failed": result.reasons[0]}),
    }


def measure_limit(name: str, solver: str, limit_s: float) -> dict:
    """Run the command under a limit on a captured model, and see when it ends."""
    import contextlib
    import io
    import tempfile

    import commands.search
    import planner.deadline
    from cli import app
    from planner.errors import PlannerError

    question = question_of(name)
    graph = cached_graph(question.case, CASES[question.case])
    commands.search.graph_of = lambda *_: graph
    searched, after, told = Clock(), Clock(), io.StringIO()
    limited = planner.deadline.within

    @contextmanager
    def within(*args, **kwargs) -> Iterator[None]:
        try:
            with searched.running(), limited(*args, **kwargs):
                yield
        finally:
            if not searched.depth:
                after.start()

    planner.deadline.within = within
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(told):
        model = Path(folder) / "model.py"
        model.write_text("")
        out = Path(folder) / "plan.json"
        arguments = ["search", str(model), "--out", str(out), "--profile", PROFILE, "--no-cache"]
        arguments += [*question.options, "--solver", solver, "--time-limit", f"{limit_s}s"]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                app(arguments)
        except PlannerError as error:
            told.write(str(error))
        after.stop()
        past = (searched.wall_s + after.wall_s) / limit_s - 1
        row = {**searched.told("search"), **after.told("after"), "past": round(past, 3)}
        if out.exists():
            proof = json.loads(out.read_text())["estimate"]["certificate"]
            row |= {"gap": proof["gap"], "step_s": proof["best_s"], "why": proof["stopped_early"]}
        else:
            row["failed"] = " ".join(told.getvalue().split())
    return row


# ---------------------------------------------------------------------------------------


SMALLEST = {"blocks": ("chain", 50), "first": (TINY, "dp"), "limit": (TINY, "dp", 5)}


def rows_of(what: str) -> Iterator[tuple]:
    """Yield the arguments of each row."""
    if what == "blocks":
        yield from product(SHAPES, SIZES)
    elif what == "first":
        yield from product(QUESTIONS, SOLVERS)
    else:
        yield from product(QUESTIONS, SOLVERS, LIMITS_S)


MEASURES = {"blocks": measure_block, "first": measure_first, "limit": measure_limit}


def prepare(what: str, of: tuple) -> dict:
    """Capture the model of a row if no run has; return what that took."""
    clock = Clock()
    with clock.running():
        if what == "blocks":
            kept_graph("-".join(map(str, of)), lambda: captured_block(*of))
        else:
            case = question_of(of[0]).case
            cached_graph(case, CASES[case])
    return clock.told("capture") if clock.cpu_s > 1.0 else {}


@benchmark("budgets", quick={"smallest": True})
def budgets(
    *,
    what: Annotated[tuple[str, ...], "which of them"] = tuple(MEASURES),
    only: Annotated[str, "rows whose name has this text"] = "",
    smallest: Annotated[bool, "the smallest row of each, which is none of the others"] = False,
) -> Result:
    rows = []
    for kind in what:
        for of in [SMALLEST[kind]] if smallest else rows_of(kind):
            name = ", ".join(map(str, (kind, *of)))
            if only in name:
                captured = prepare(kind, of)
                row = in_own_process(MEASURES[kind], *of)
                rows.append({"row": name, **captured, **row})
                note(rows[-1])
    return Result(rows)
