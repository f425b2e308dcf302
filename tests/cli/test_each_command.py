"""What each command decides itself: what it refuses first, and what it hands to the rooms."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer

import commands.dryrun
import commands.show
import commands.verify
import commands.why
from commands.common import options
from commands.common.prediction import predict
from commands.common.question import Question, parse_choices
from commands.compare import compare
from commands.estimate import estimate
from commands.launch import launch
from commands.profile import profile
from commands.render import console
from commands.simulate import simulate
from commands.timeline import timeline
from costmodel import estimate as estimate_plan
from costmodel.estimate import cost_cache
from costmodel.execution import find_execution
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.runtime.proofs.by_block.report import Part, Proof
from planner.runtime.proofs.dryrun import DryRun
from planner.runtime.proofs.verify import Difference, VerifyReport
from planner.units import GIB
from profiles import load_profile
from search import SearchRequest
from tests.captures import capture_tiny

PLAN, MODEL, RUN = Path("plan.json"), Path("model.py"), Path("run")


@pytest.fixture
def plan(tmp_path) -> Path:
    """A plan file of the tiny MLP on two ranks."""
    save_plan(default_plan(capture_tiny("mlp"), dp=2, microbatch_size=4), tmp_path / "plan.json")
    return tmp_path / "plan.json"


# What is read is not replaced, and nothing is read before that is known


def test_a_trace_in_place_of_the_plan_is_refused_before_it_is_read():
    with pytest.raises(PlannerError, match=r"writing the trace to plan\.json would replace"):
        compare(PLAN, MODEL, RUN, trace=PLAN)
    with pytest.raises(PlannerError, match=r"writing the trace to model\.py would replace"):
        simulate(PLAN, MODEL, trace=MODEL)


def test_a_trace_in_place_of_a_folder_is_refused_before_the_run_is_read(tmp_path):
    with pytest.raises(PlannerError, match=r"can't write the trace .* it is a directory"):
        timeline(RUN, trace=tmp_path)


def test_a_file_inside_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match=r"can't write it to .*file/a/b: .*file is a file"):
        console.check_writable(tmp_path / "file" / "a" / "b", "it")
    console.check_writable(tmp_path / "new" / "b", "it")
    console.check_writable(None, "it")


def test_the_stage_of_the_work_is_known_to_an_error():
    with console.show_progress("searching") as progress:
        assert console.stage() == "searching"
        progress(0.5, "cutting")
    assert console.stage() == "searching, cutting"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_narrow_screen_cuts_only_what_is_being_done(monkeypatch, width):
    """The title stays whole, in one line."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    for name, value in {"COLUMNS": width, "LINES": 25, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, str(value))
    with console.show_progress("searching") as progress:
        progress(0.5, "best 1.81 ms, gap 0.3%; trying dp 16 x pp 4" + ", and more" * 20)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()).replace("\r", "\n").split("\n")
    told = [line for line in lines if "best" in line]
    assert told
    assert all(line.startswith("searching ") and len(line) <= width for line in told)


# `estimate` has two forms, which do not mix


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give PLAN and MODEL, or --batch"),
        ({"plan": PLAN}, "give PLAN and MODEL, or --batch"),
        ({"batch": RUN}, "--batch and --out go together"),
        ({"batch": RUN, "out": RUN, "plan": PLAN}, "not both"),
        ({"batch": RUN, "out": RUN, "profile": "h100"}, "leave --profile out"),
        ({"batch": RUN, "out": RUN, "execution": "nanotron"}, "leave --execution and --clip"),
        ({"batch": RUN, "out": RUN, "clip_gradients": True}, "leave --execution and --clip"),
        ({"plan": PLAN, "model": MODEL, "execution": "warm"}, "'warm' is unknown; .*ours-eager"),
    ],
)
def test_forms_of_estimate_do_not_mix(given, says):
    with pytest.raises(PlannerError, match=says):
        estimate(**given)


@pytest.mark.parametrize("choices", [{}, {"clip_gradients": True}, {"execution": "ours-compiled"}])
def test_a_prediction_is_the_cost_model_s(plan, monkeypatch, choices):
    """Priced in training, under the named profile, with the step that was asked for."""
    graph, machine = capture_tiny("mlp"), load_profile("h100-sxm5-80gb")
    monkeypatch.setattr("commands.common.prediction.graph_of_plan", lambda plan, model: graph)
    found = predict(plan, MODEL, "h100-sxm5-80gb", doing="estimating", **choices)
    costs = cost_cache(
        graph,
        machine,
        2,
        execution=find_execution(choices.get("execution", "ours-eager")),
        clips_gradients=choices.get("clip_gradients", False),
    )
    expected = estimate_plan(graph, machine, found.plan, costs=costs)
    assert found.estimate.step_s == pytest.approx(expected.step_s)
    assert found.note == ""  # a profile that was named needs no remark


# `launch` and `profile` hand on what they are given


def test_options_after_the_script_are_the_script_s(planner, plan, monkeypatch):
    handed: list[Any] = []
    monkeypatch.chdir(plan.parent)

    def start(*args: Any, **settings: Any) -> int:
        handed.extend((args, settings))
        return 7

    monkeypatch.setattr("planner.runtime.start.launch.launch", start)
    words = ("--num-nodes", "2", "plan.json", "train.py", "--lr", "1", "--num-nodes", "9")
    assert planner("launch", *words).code == 7
    args, settings = handed
    assert args[2] == ["--lr", "1", "--num-nodes", "9"]
    assert settings["num_nodes"] == 2
    assert launch(PLAN, MODEL) == 7
    assert handed[2][2] == []


@pytest.mark.parametrize(
    ("given", "nproc"),
    [({}, 2), ({"gpus": 4}, 4), ({"gpus": 4, "nproc": 3}, 3)],
)
def test_as_many_processes_measure_as_devices_are_asked_for(monkeypatch, capsys, given, nproc):
    handed: dict[str, Any] = {}
    monkeypatch.setattr("profiles.measure_profile", lambda folder, **more: handed.update(more))
    assert profile(device="cpu", out=Path("out"), budget="2m", **given) == 0
    assert handed["nproc"] == nproc
    assert handed["gpus"] == given.get("gpus")
    assert handed["budget_s"] == 120
    assert capsys.readouterr().out == "", "another rank tells"


# What is asked of the rooms, and what their answers become


def test_show_captures_a_model_only_to_name_its_blocks(plan, monkeypatch, capsys):
    asked: list[tuple[Path, str]] = []

    def graph_of(model: Path, precision: str) -> Any:
        asked.append((model, precision))
        return capture_tiny("mlp")

    monkeypatch.setattr(commands.show, "graph_of", graph_of)
    commands.show.show(plan)
    assert asked == []
    without = capsys.readouterr().out
    commands.show.show(plan, MODEL)
    assert asked == [(MODEL, "model")]
    assert "parameters" in capsys.readouterr().out
    assert "parameters" not in without.split("Stages")[1].splitlines()[2]


def test_dryrun_runs_the_rank_asked_for(plan, monkeypatch, capsys):
    def run(loaded: Any, graph: Any, build: Any, *, rank: int) -> DryRun:
        return DryRun(
            rank=rank,
            pp_rank=0,
            batch_bytes=0,
            rest_bytes=2**20,
            host_rest_bytes=0,
            start_bytes=2**19,
            start_host_bytes=2**18,
            samples=(),
        )

    monkeypatch.setattr(commands.dryrun, "graph_of_plan", lambda plan, model: None)
    monkeypatch.setattr("planner.capture.source.model_file.load_model_file", lambda path: Source())
    monkeypatch.setattr("planner.runtime.proofs.dryrun.dry_run", run)
    commands.dryrun.dryrun(plan, MODEL, rank=1)
    said = capsys.readouterr().out
    said = " ".join(said.split())
    assert "rank 1 (pp rank 0) needs " in said
    assert "1.00 MiB between steps, in tensors" in said
    assert "F0.2: forward of stage 0, microbatch 2" in said
    assert "when it starts it holds 512" in said


class Source:
    build = loss_weight = None


@pytest.mark.parametrize(("times", "code"), [(0.5, 0), (1e6, 1)])
def test_verify_exits_with_the_verdict(plan, monkeypatch, capsys, times, code):
    rounding = 1e-9
    found = Difference(relative=times * rounding, rounding=rounding, name="fc1.weight", step=1)
    report = VerifyReport(num_ranks=2, tolerance=1e-8, parameter=found, notes=("a note",))
    graph = capture_tiny("mlp")
    monkeypatch.setattr(commands.verify, "graph_of_plan", lambda plan, model: graph)
    monkeypatch.setattr("planner.capture.source.model_file.load_model_file", lambda model: Source)
    monkeypatch.setattr("planner.runtime.proofs.verify.verify", lambda *args, **more: report)
    assert commands.verify.verify(plan, MODEL) == code
    said = capsys.readouterr().out
    assert ("NOT the same" in said) == bool(code)
    assert "note: a note" in said
    assert ("planner launch" in said) == (not code)  # what to type next


def _proof(*faults: str) -> Proof:
    blocks = Part(name="blocks", counted="3 classes", faults=faults, times_rounding=1.5)
    return Proof(
        world_size=1024,
        parts=(Part(name="wiring", counted="6 blocks"), blocks),
        cuts=("sequences were cut from 8192 to 16 positions",),
        unproven=("loading of data",),
    )


@pytest.mark.parametrize(("faults", "code"), [((), 0), (("p0 differs", "p1 lacks"), 1)])
def test_verify_by_block_says_what_was_proven_and_what_not(plan, monkeypatch, capsys, faults, code):
    """N6: the verdict names the first fault; the others, cuts and what is open stand before it."""
    monkeypatch.setattr(commands.verify, "graph_of_plan", lambda plan, model: None)
    monkeypatch.setattr(
        "planner.language.across.cut.whole_batch.refuse_cut", lambda *args, **more: None
    )
    source = SimpleNamespace(path=Path("model.py"), loss_weight=None)
    monkeypatch.setattr("planner.capture.source.model_file.load_model_file", lambda path: source)
    monkeypatch.setattr(
        "planner.runtime.proofs.by_block.prove.prove", lambda *args, **more: _proof(*faults)
    )
    assert commands.verify.verify(plan, MODEL, by_block=True) == code
    said = capsys.readouterr().out
    assert ("NOT proven: p0 differs" in said, "wrong: p1 lacks" in said) == (bool(code),) * 2
    assert "run as: sequences were cut" in said
    assert "not proven: loading of data" in said
    assert "plan of 1024 ranks" in said


@pytest.mark.parametrize("option", ["steps", "device"])
def test_verify_by_block_trains_no_steps(plan, option):
    with pytest.raises(PlannerError, match=f"--{option} was given with --by-block"):
        commands.verify.verify(plan, MODEL, by_block=True, **{option: 1})


def test_why_compares_the_choices_given(monkeypatch, capsys):
    """Pins too, which are known with the graph."""
    asked: list[SearchRequest] = []
    graph = capture_tiny("mlp")
    monkeypatch.setattr(commands.why, "graph_of", lambda model, precision: graph)
    monkeypatch.setattr(
        "search.report.explain.compare_choices",
        lambda graph, profile, request, progress: asked.append(request),
    )
    monkeypatch.setattr(
        "commands.render.plans.search.describe_comparison", lambda found: ["compared"]
    )
    commands.why.why(model=MODEL, **vars(Question(gpus=2, tp=2, pin=["fc1.weight: S(0)@tp"])))
    (request,) = asked
    assert request.tp == 2
    assert [placement for _, _, placement in request.pins] == ["S(0)"]
    assert capsys.readouterr().out == "compared\n"


# The question of `search` and `why`


def test_a_bare_question_asks_what_a_bare_request_does():
    """So that a default of the command line is not another than that of the interface."""
    request = Question(gpus=4).request(MODEL)
    assert request == SearchRequest(num_devices=4, global_batch=32, model_file="model.py")


def test_a_question_is_in_gib_and_a_request_in_bytes():
    request = Question(gpus=2, memory_limit=1.5, balance="1,3", global_batch=6).request(MODEL)
    assert request.memory_limit_bytes == 3 * GIB // 2
    assert request.balance == (1, 3)
    assert request.global_batch == 6


def test_choices_have_one_or_several_values():
    assert parse_choices("--allow", ["microbatch-size=1", "tp=2, 4"]) == (
        ("microbatch_size", "1"), ("tp", "2"), ("tp", "4"),
    )  # fmt: skip


def test_a_group_of_options_stands_where_its_parameter_stood():
    @dataclass(frozen=True, kw_only=True)
    class Size:
        width: Annotated[int, typer.Option()]
        height: Annotated[int, typer.Option()] = 3

    globals()["Size"] = Size  # where its name is looked up

    @options.spread(Size)
    def command(before: int, size: Size, after: int = 0) -> Any:
        return before, size, after

    app = typer.Typer()
    app.command()(command)
    (found,) = [typer.main.get_command(app)]
    assert [parameter.name for parameter in found.params[:4]] == [
        "before", "width", "height", "after"
    ]  # fmt: skip
    assert command(before=1, width=2, height=3, after=4) == (1, Size(width=2), 4)
