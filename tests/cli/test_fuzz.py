"""N2, N3: damaged plans and profiles, and wrong options: one line and exit code 2, or an answer."""

from __future__ import annotations

import contextlib
import io
import random
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import cli
import profiles
from cli import app
from planner.capture.source.capture_cache import load_graph
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import load_plan, save_plan
from profiles.store import write_collectives, write_ops, write_profile_file
from tests.cli.conftest import MODEL_FILE
from tests.cli.damages import damaged_csv, damaged_json
from tests.profiles import samples

LONGEST_S = 30.0
"""Seconds of a processor that a command may take; the slowest takes one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command answered in this process."""

    code: int
    stderr: str
    seconds: float

    def fault(self) -> str:
        """Return what is wrong with it; nothing, if it is as it should be."""
        lines = self.stderr.strip().splitlines()
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}: {self.stderr}"
        if self.code == 2 and not (len(lines) == 1 and lines[0].startswith("planner: ")):
            return f"{len(lines)} lines: {self.stderr}"
        if "Traceback" in self.stderr or self.seconds > LONGEST_S:
            return f"{self.seconds:.0f} s: {self.stderr}"
        return ""


def answer(*arguments: object) -> Answer:
    """Run `planner ARGUMENTS…` here."""
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.run([str(argument) for argument in arguments])
        except SystemExit as error:
            code = 99 if error.code is None else int(error.code)
    return Answer(code=code, stderr=err.getvalue(), seconds=time.process_time() - began)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with model.py, plan.json for it, a measured profile and a recorded run."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "model.py").write_text(MODEL_FILE.format(layers=4, width=8, body="pass"))
        searched = answer(
            *("search", "model.py", "--profile", "h100-sxm5-80gb", "--gpus", 4, "--tp", 2),
            *("--pp", 2, "--global-batch", 8),
        )
        assert searched.code == 0, searched.stderr
        # Placements worth damaging, which the fastest plan of so small a model has not.
        found = load_plan("plan.json")
        split = default_plan(
            load_graph(folder / "model.py"), file="model.py", tp=2, pp=2, microbatch_size=2,
            num_microbatches=4,
        )  # fmt: skip
        assert any(layout.ops for layout in split.layouts)
        save_plan(split.model_copy(update={"estimate": found.estimate}), "plan.json")
        record_run(folder)
        write_profile_file(folder / "shipped", profiles.load_profile("h100-sxm5-80gb").file)
        write_measured(folder / "measured")
        assert answer("profile", "--check", "measured").code == 0
    return folder


def record_run(folder: Path) -> None:
    """Write the timeline of a step as the plan's schedule would run it, a second a job."""
    from planner.language.plan.schedule_of import schedule_of
    from planner.timeline import RankTimeline, Span, save_timeline

    plan = load_plan(folder / "plan.json")
    schedule = schedule_of(plan)
    ranks = []
    for rank in range(plan.world_size):
        pp_rank = rank // (plan.dp * plan.cp * plan.tp)
        spans = tuple(
            Span(
                kind=job.kind,
                name=f"{job.kind}{job.microbatch_index}",
                step=step,
                start_s=100.0 * step + at,
                end_s=100.0 * step + at + 1,
                stage=job.stage_index,
                microbatch=job.microbatch_index,
            )
            for step in range(3)
            for at, job in enumerate(schedule.jobs[pp_rank])
        )
        ranks.append(RankTimeline(rank=rank, pp_rank=pp_rank, clock_offset_s=0.0, spans=spans))
    save_timeline(ranks, folder / "run")


def write_measured(folder: Path) -> None:
    """Write a small profile with measurements of ops and collectives."""
    fit = samples.op_fit("elementwise", overhead_s=1e-6, s_per_byte=1e-9)
    ops = [
        samples.linear_record(m, n, 8, direction=direction)
        for m in (8, 64)
        for n in (8, 16)
        for direction in ("forward", "backward")
    ]
    collectives = [
        samples.collective_record(kind, size, 1e-5 + size * 1e-9, ranks_per_node=ranks)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
        for size in (1024, 1 << 20)
        for ranks in (2, 4)
    ]
    write_profile_file(folder, samples.file(op_fits=(fit,)))
    write_ops(folder, ops)
    write_collectives(folder, collectives)


@pytest.fixture
def there(files, tmp_path, monkeypatch) -> Path:
    """Stand in a copy of that folder; no rank and no page is started, and nothing is drawn on a
    terminal.
    """

    def not_started(*args, **kwargs):
        raise PlannerError("here processes would start")

    here = shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("planner.runtime.start.workers.run_workers", not_started)
    monkeypatch.setattr("planner.runtime.start.launch.run_workers", not_started)
    monkeypatch.setattr("profiles.measure_profile", not_started)
    monkeypatch.setattr("commands.page.worker.Worker", not_started)  # `ui` would serve for ever
    return here


Damage = Callable[[Path, random.Random], None]


def damage_plan(folder: Path, draw: random.Random) -> None:
    text = (folder / "plan.json").read_text()
    (folder / "damaged.json").write_bytes(damaged_json(text, draw))


def damage_profile(folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder / "damaged", ignore_errors=True)
    shutil.copytree(folder / draw.choice(("shipped", "measured", "measured")), folder / "damaged")
    path = draw.choice(sorted((folder / "damaged").iterdir()))
    damaged = damaged_json if path.suffix == ".json" else damaged_csv
    path.write_bytes(damaged(path.read_text(), draw))


ON_H100 = ("--profile", "h100-sxm5-80gb")
WITH_PLAN: tuple[tuple[str, ...], ...] = (
    ("show", "damaged.json"),
    ("show", "damaged.json", "model.py"),
    ("estimate", "damaged.json", "model.py", *ON_H100),
    ("simulate", "damaged.json", "model.py", *ON_H100),
    ("launch", "--device", "cpu", "damaged.json", "model.py"),
    ("verify", "damaged.json", "model.py", "--device", "cpu"),
    ("compare", "damaged.json", "model.py", "run", *ON_H100),
)
SLOW_WITH_PLAN = (("dryrun", "damaged.json", "model.py"),)
WITH_PROFILE: tuple[tuple[str, ...], ...] = (
    ("profile", "show", "damaged"),
    ("profile", "--check", "damaged"),
    ("estimate", "plan.json", "model.py", "--profile", "damaged"),
    ("simulate", "plan.json", "model.py", "--profile", "damaged"),
    ("compare", "plan.json", "model.py", "run", "--profile", "damaged"),
)
SLOW_WITH_PROFILE: tuple[tuple[str, ...], ...] = (
    ("search", "model.py", "--gpus", "4", "--global-batch", "8", "--no-cache",
     "--out", "found.json", "--profile", "damaged"),
    ("why", "model.py", "--gpus", "4", "--global-batch", "8", "--tp", "2", "--profile", "damaged"),
)  # fmt: skip


def faults(
    folder: Path, damage: Damage, commands: Sequence[Sequence[str]], seeds: Sequence[int]
) -> list[str]:
    """Return what is wrong with the answers to damaged files, a command drawn for each."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        damage(folder, draw)
        command = draw.choice(commands)
        if fault := answer(*command).fault():
            found.append(f"seed {seed}, planner {' '.join(command)}: {fault}")
    return found


RIGHT = {
    "plan": ("plan.json",),
    "model": ("model.py",),
    "models": ("model.py", "show"),
    "script": ("model.py",),
    "folder": ("run", "measured", "."),
    "profile": ("h100-sxm5-80gb", "measured", "shipped"),
    "gpus": ("1", "2", "4", "6"),
    "global_batch": ("8", "12", "64"),
    "out": ("found.json",),
    "trace": ("traced.json",),
    "pareto": ("pareto.json",),
    "plots": ("plots.html",),
    "timeline": ("recorded",),
    "check": ("measured", "shipped"),
    "batch": ("rows.csv",),
    "runs": ("run", "measured"),
    "gpu": ("H100", "A100"),
}
WRONG = (
    *("", " ", "-1", "0", "1", "2", "3", "1.5", "nan", "inf", "-inf", "1e999", "9" * 30, "x", "é"),
    *(
        "none",
        "auto",
        "1f1b",
        "tp=2",
        "=",
        "a=b=c",
        "1,2",
        "1,,2",
        ",",
        "S(0)",
        "*: S(0)@tp",
        "[",
        "(",
    ),
    *("model.py", "plan.json", "run", "nosuch", "nosuch/x", ".", "\x01", "--", "-"),
)
"""Values for any option: right for some, wrong for most."""


def command_line(draw: random.Random) -> list[str]:
    """Return a random command line: mostly right arguments, and mostly wrong options."""
    commands = typer.main.get_command(app).commands
    name = draw.choice(sorted(commands))
    words = [name]

    def value(parameter: str, wrong: float) -> str:
        right = RIGHT.get(parameter, WRONG)
        return draw.choice(WRONG if draw.random() < wrong else right)

    parameters = commands[name].params
    arguments, options = [], []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            if draw.random() < 0.95:
                arguments.append(value(parameter.name, 0.1))
        elif parameter.name in ("gpus", "profile") and draw.random() < 0.9:
            options += [parameter.opts[0], value(parameter.name, 0.15)]
    offered = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    for parameter in draw.sample(offered, min(len(offered), draw.choice((0, 1, 1, 2, 3)))):
        flag = draw.choice([*parameter.opts, *parameter.secondary_opts])
        options += [flag] if parameter.is_flag else [flag, value(parameter.name, 0.7)]
    options += draw.choices(("--nosuch", "extra", "-x"), k=draw.random() < 0.05)
    # (The options of `launch` come first.)
    return [*words, *options, *arguments] if draw.random() < 0.5 else [*words, *arguments, *options]


def faults_of_lines(seeds: Sequence[int]) -> list[str]:
    """Return what is wrong with the answers to random command lines."""
    found = []
    for seed in seeds:
        line = command_line(random.Random(seed))
        if fault := answer(*line).fault():
            found.append(f"seed {seed}, planner {shlex.join(line)}: {fault}")
    return found


def test_wrong_command_lines(there):
    assert not faults_of_lines(range(14))


@pytest.mark.slow
def test_three_hundred_wrong_command_lines(there):
    assert not faults_of_lines([*range(14, 40), *range(1000, 1300)])


def test_damaged_plans(there):
    assert not faults(there, damage_plan, WITH_PLAN, range(20))


def test_damaged_profiles(there):
    assert not faults(there, damage_profile, WITH_PROFILE, range(20))


@pytest.mark.slow
def test_a_thousand_damaged_plans(there):
    assert not faults(there, damage_plan, (*WITH_PLAN, *SLOW_WITH_PLAN), range(1000, 2000))


@pytest.mark.slow
def test_a_thousand_damaged_profiles(there):
    commands = (*WITH_PROFILE, *SLOW_WITH_PROFILE)
    assert not faults(there, damage_profile, commands, range(1000, 2000))
