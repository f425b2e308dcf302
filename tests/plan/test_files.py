"""Plan files: what is written is read, and what is damaged is told in one line."""

from __future__ import annotations

import json

import pytest

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan.files import load_plan, save_plan
from tests.captures import capture_tiny


@pytest.fixture(scope="module")
def plan():
    return default_plan(capture_tiny("mlp"), dp=2, num_microbatches=4, zero_stage=1)


def test_a_plan_survives_its_file(plan, tmp_path):
    file = tmp_path / "folder" / "plan.json"
    save_plan(plan, file)
    assert load_plan(file) == plan
    assert [path.name for path in file.parent.iterdir()] == ["plan.json"]  # no scratch is left
    assert json.loads(file.read_text())["dp"] == 2  # degrees are fields by the names of the axes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "x"}, "is not a plan"),
        ({"version": 99}, "has plan version 99"),
        ({"version": "2"}, "has plan version '2'"),
        ({"num_microbatches": 0}, "is damaged at num_microbatches"),
        ({"dp": 0}, "is damaged at d"),
        ({"surprise": 1}, "is damaged at surprise"),
    ],
)
def test_damage_is_told_by_field(plan, tmp_path, change, says):
    file = tmp_path / "plan.json"
    save_plan(plan, file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PlanError, match=says) as told:
        load_plan(file)
    assert "\n" not in str(told.value)


def test_what_is_no_file_of_json(plan, tmp_path):
    with pytest.raises(PlanError, match="no plan file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="is a directory"):
        load_plan(tmp_path)
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(PlanError, match="not readable JSON"):
        load_plan(tmp_path / "half.json")
    with pytest.raises(PlanError, match="it is a directory"):
        save_plan(plan, tmp_path)
    with pytest.raises(PlanError, match="can't write the plan"):
        save_plan(plan, tmp_path / "half.json" / "plan.json")
