"""X6: `planner diff`, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli
from commands.diff import diff
from planner.language.plan import load_plan, save_plan
from planner.language.plan.diff import patched
from tests.plan.test_diff import plan_of


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, name in zip(paths, ("pp2", "recompute"), strict=True):
        save_plan(plan_of(name), path)
    return paths


def test_the_same_plan_is_told_in_a_line(files, capsys):
    assert cli.run(["diff", str(files[0]), str(files[0])]) == 0
    assert capsys.readouterr().out == "the plans decide the same\n"


def test_tables_json_and_a_patch(files, capsys, tmp_path):
    first, second = map(str, files)
    assert cli.run(["diff", first, second, "--patch", str(tmp_path / "patch.json")]) == 0
    out = capsys.readouterr().out
    assert "recompute none" in out
    assert "recompute full" in out
    assert "Predicted cost" in out
    made = json.loads((tmp_path / "patch.json").read_text())
    assert patched(load_plan(files[0]), made) == load_plan(files[1])
    assert cli.run(["diff", first, second, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["blocks"][0]["after"] == "recompute full"
    assert not data["is_empty"]


def test_a_patch_over_a_plan_is_refused(files, capsys):
    first, second = map(str, files)
    assert cli.run(["diff", first, second, "--patch", first]) == 2
    assert load_plan(files[0]) == plan_of("pp2")
    assert capsys.readouterr().err.count("\n") == 1


def test_data_and_a_patch_go_from_the_first_plan_to_the_second(files, capsys, tmp_path):
    first, second = files
    made = tmp_path / "patch.json"
    diff(plan=second, other=first, patch=made, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert (data["blocks"][0]["before"], data["blocks"][0]["after"]) == (
        "recompute full",
        "recompute none",
    )
    assert data["parameters"] == []  # of a model that is not known
    assert patched(load_plan(second), json.loads(made.read_text())) == load_plan(first)


def test_with_the_model_parameters_that_move_are_named(planner, write_model, tmp_path, capfd):
    from planner.capture.source.capture_cache import load_graph
    from planner.language.lowering.defaults import default_plan

    path = write_model()
    graph = load_graph(path)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for each, pp in zip(paths, (1, 2), strict=True):
        save_plan(default_plan(graph, file="model.py", pp=pp, num_microbatches=2), each)
    capfd.readouterr()
    diff(plan=paths[0], other=paths[1], model=path, as_json=True)
    moved = json.loads(capfd.readouterr().out)["parameters"]
    assert any("layers.3" in name for each in moved for name in each["names"])
