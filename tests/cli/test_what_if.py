"""X3: `planner what-if`, by the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from commands.render.plans.what_if import Terms, answers_as_data, describe_answers
from commands.what_if import what_if
from planner.errors import PlannerError
from planner.language.plan import load_plan, save_plan
from search.report.what_if import Answer, Case
from tests.captures import capture_tiny

MODEL = """
import torch
from torch import nn


def model(width=16, layers=2):
    return nn.Sequential(nn.Embedding(32, width), *(nn.Linear(width, width) for _ in range(layers)))


def loss(output, batch):
    return output.square().mean()


def batch(size):
    return (torch.zeros(size, 8, dtype=torch.int64),)
"""


@pytest.fixture
def files(planner, tmp_path) -> tuple[str, str]:
    (tmp_path / "model.py").write_text(MODEL)
    found = planner(
        "search", "model.py", "--gpus", 2, "--global-batch", 8, "--profile", "h100-sxm5-80gb"
    )
    assert found.code == 0, found.stderr
    return "plan.json", "model.py"


def test_a_plan_without_an_estimate_is_priced(planner, files):
    """Plans made by hand have none."""
    plan = load_plan("plan.json")
    save_plan(plan.model_copy(update={"estimate": {}}), "bare.json")
    told = planner("what-if", "bare.json", "model.py", "--global-batch", "16", "--json")
    assert told.code == 0, told.stderr
    step_s = json.loads(told.stdout)["plan"]["step_s"]
    assert step_s == pytest.approx(plan.estimate["step_s"])


def test_combinations_beside_the_plan(planner, files):
    """Each answer is what `planner search` says of the changed question."""
    told = planner("what-if", *files, "--gpus", "2..4", "--set", "layers=2,3", "--json")
    assert told.code == 0, told.stderr
    data = json.loads(told.stdout)
    assert data["plan"]["changed"] == {}
    assert [answer["changed"] for answer in data["what_if"]] == [
        {"arguments": {"layers": 2}},
        {"arguments": {"layers": 3}},
        {"num_devices": 4, "arguments": {"layers": 2}},
        {"num_devices": 4, "arguments": {"layers": 3}},
    ]
    assert data["what_if"][0]["step_s"] == data["plan"]["step_s"]
    assert data["what_if"][1]["peak_bytes"] > data["what_if"][0]["peak_bytes"]
    fresh = planner(
        "search", "model.py", "--gpus", 4, "--global-batch", 8, "--profile", "h100-sxm5-80gb",
        "--out", "four.json",
    )  # fmt: skip
    assert fresh.code == 0
    four = json.loads(Path("four.json").read_text())["estimate"]
    assert data["what_if"][2]["step_s"] == four["step_s"]
    assert data["what_if"][2]["peak_bytes"] == four["peak_bytes"]


def test_money_and_days(planner, files):
    told = planner("what-if", *files, "--gpus", "4", "--price", "2.5/gpu-hour", "--tokens", "1e9")
    assert told.code == 0, told.stderr
    header = next(line for line in told.stdout.splitlines() if "GPUs" in line)
    assert "cost" in header
    assert "days" in header


def test_how_many_devices_for_a_deadline(planner, files):
    told = planner("what-if", *files, "--tokens", "1e9", "--deadline", "300d")
    assert told.code == 0, told.stderr
    assert "8 devices are enough" in told.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--gpus", "8..4"), "--gpus 8..4 is not understood; .* such as 8..1024"),
        (("--gpus", "two"), "--gpus two is not understood"),
        (("--memory-limit", "-1"), "--memory-limit -1 is not understood"),
        (("--link-rate", "fast"), "--link-rate fast is not understood"),
        (("--set", "layers"), "--set layers is not understood"),
        (("--price", "cheap"), "--price cheap is not understood"),
        (("--tokens", "-1"), "--tokens -1 was given"),
        (("--deadline", "30d"), "--deadline 30d .* goes with --tokens"),
        (("--tokens", "1e9", "--deadline", "soon"), "--deadline soon is not a time"),
        (("--precision", "int4"), "--precision int4 was given"),
        (("--execution", "warm"), "'warm' is unknown"),
        (("--profile", "h999"), "no profile 'h999'"),
        (("--gpus", ",".join(map(str, range(1, 300)))), "299 combinations .* 256 are the most"),
    ],
)
def test_what_is_wrong_is_told_before_any_search(planner, tmp_path, given, says):
    from planner.language.lowering.defaults import default_plan

    save_plan(default_plan(capture_tiny("mlp"), dp=2, microbatch_size=4), tmp_path / "plan.json")
    (tmp_path / "model.py").write_text("")
    assert re.search(says, planner("what-if", "plan.json", "model.py", *given).complaint)


def test_a_model_that_takes_no_such_argument_is_a_row(planner, files):
    told = planner("what-if", *files, "--set", "depth=3")
    assert told.code == 0
    told = " ".join(told.stdout.split())
    assert "none: model() of model.py was given depth=3" in told


def test_a_plan_of_a_machine_that_is_not_here_is_told(planner, files):
    plan = json.loads(Path("plan.json").read_text())
    plan["cluster"]["name"] = "gone"
    Path("plan.json").write_text(json.dumps(plan))
    told = planner("what-if", *files, "--gpus", "4")
    assert told.code == 0
    assert "the plan was searched for 'gone', of which there is no profile here" in told.stderr


def test_a_report_of_such_a_plan_is_drawn_too(planner, files):
    plan = json.loads(Path("plan.json").read_text())
    plan["cluster"]["name"] = "gone"
    Path("plan.json").write_text(json.dumps(plan))
    told = planner("show", *files, "--html", "report.html")
    assert told.code == 0, told.stderr
    assert "the plan was searched for 'gone', of which there is no profile here" in told.stderr


CASE = Case(
    num_devices=8, profile=None, memory_limit_bytes=None, link_rate=1.0, global_batch=8,
    length=None, precision="model", execution="ours-eager",
)  # fmt: skip


def test_an_answer_without_a_plan_has_its_reason_in_the_data():
    answer = Answer(
        case=CASE, plan=None, reason="`num_devices` 8 is too few", step_s=float("inf"),
        peak_bytes=0.0, tokens_per_s=0.0,
    )  # fmt: skip
    data = answers_as_data(answer, [answer], Terms())
    assert data["what_if"] == [{"changed": {}, "fits": False, "reason": "--gpus 8 is too few"}]
    assert "nothing was changed" in str(describe_answers(answer, [], Terms())[-1])


def test_a_deadline_answers_the_number_of_devices():
    with pytest.raises(PlannerError, match="without --gpus, which it answers"):
        what_if(
            plan=Path("plan.json"), model=Path("model.py"), gpus="8", tokens=1e9, deadline="30d"
        )


@pytest.mark.parametrize("width", [80, 120])
def test_plans_have_room_on_a_narrow_screen_and_refusals_are_lines(planner, files, width):
    """Figures stay on one line each; a reason is not squeezed into a column."""
    plan = load_plan("plan.json")
    answer, none = (
        Answer(
            case=replace(CASE, num_devices=gpus), plan=found, reason="" if found else "too few",
            step_s=0.1, peak_bytes=2.0**30, tokens_per_s=1e6,
        )
        for gpus, found in ((4096, plan), (8, None))
    )  # fmt: skip
    console = Console(width=width)
    with console.capture() as told:
        console.print(*describe_answers(answer, [none], Terms(price=2.5, tokens=1e12)))
    lines = [line.rstrip() for line in told.get().splitlines()]
    assert "! GPUs 8: none: too few" in lines
    assert "…" not in told.get()
    assert ("Plans" in lines) == (width < 100)
    (figures,) = [line for line in lines if "1,000,000" in line]
    assert figures.split()[0] == "4096"
