"""Files that earlier versions wrote are read, or refused in one line that says what to do.

`tests/data/formats` has real files: each was written by the code of its time, by `planner search`,
`planner profile` and `planner launch --timeline` with model.py there. A change of a format adds
one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from planner.language.plan import load_plan
from planner.language.plan.plan import PLAN_VERSION
from planner.runtime.checkpoint.folder import VERSION as CHECKPOINT_VERSION
from planner.timeline import VERSION as RUN_VERSION
from planner.timeline import load_timeline
from profiles import load_profile
from profiles.records import SCHEMA_VERSION

FORMATS = Path(__file__).resolve().parents[1] / "data" / "formats"
H100 = ("--profile", "h100-sxm5-80gb")


@pytest.fixture
def here(planner, tmp_path):
    """All of the files, in this folder."""
    shutil.copytree(FORMATS, tmp_path, dirs_exist_ok=True)
    return planner


def test_every_version_that_is_written_now_has_a_file():
    assert (FORMATS / f"plan/{PLAN_VERSION}.json").exists()
    assert (FORMATS / f"profile/{SCHEMA_VERSION}").is_dir()
    assert (FORMATS / f"run/{RUN_VERSION}").is_dir()
    assert (FORMATS / f"checkpoint/{CHECKPOINT_VERSION}").is_dir()


@pytest.mark.parametrize("name", ["1", "2-first", "2-before-groups", "2"])
def test_plans_of_all_versions_are_read(name):
    """The decisions are what the file says; what it does not say is as it was then."""
    path = FORMATS / f"plan/{name}.json"
    plan, data = load_plan(path), json.loads(path.read_text())
    assert (plan.pp, plan.schedule) == (data["pp"], data["schedule"])
    assert [stage.last_block for stage in plan.stages] == [s["last_block"] for s in data["stages"]]
    assert plan.estimate == data["estimate"]
    assert (plan.execution, plan.receive_ahead) == ("ours-eager", data.get("receive_ahead", 2))


@pytest.mark.parametrize("name", ["1", "2-first", "2-before-groups", "2"])
def test_plans_of_all_versions_are_shown_and_compared(here, name):
    shown = here("show", f"plan/{name}.json")
    assert shown.code == 0, shown.stderr
    assert "a step" in shown.stdout
    assert "compute" in shown.stdout
    assert here("show", f"plan/{name}.json", "--json").code == 0


@pytest.mark.parametrize(("name", "read"), [("1", False), ("2-first", False),
                                            ("2-before-groups", True), ("2", True)])  # fmt: skip
def test_plans_whose_model_has_another_fingerprint_now_say_to_search_again(here, name, read):
    """Fingerprints of November 21 hashed other things: such a plan can't be held to its model."""
    done = here("estimate", f"plan/{name}.json", "model.py", *H100)
    if read:
        assert done.code == 0, done.stderr
    else:
        assert "search again for this model" in done.complaint
        assert "an earlier planner" in done.complaint


@pytest.mark.parametrize("version", [1, 2])
def test_profiles_of_earlier_schemas_say_to_measure_again(here, version):
    done = here("profile", "show", f"profile/{version}")
    assert f"has schema version {version}" in done.complaint
    assert f"this planner reads version {SCHEMA_VERSION}" in done.complaint
    assert "profile again into a new directory" in done.complaint


def test_profiles_of_this_schema_are_read():
    profile = load_profile(str(FORMATS / "profile/3"))
    assert profile.source == "measured"
    assert profile.ops


@pytest.mark.parametrize("version", [1, 2, 3])
def test_runs_of_all_versions_are_read(here, version):
    lines = load_timeline(FORMATS / f"run/{version}")
    assert [line.pp_rank for line in lines] == [0, 1]
    assert all(line.spans for line in lines)
    compared = here("compare", "plan/2.json", "model.py", f"run/{version}", *H100)
    assert compared.code == 0, compared.stderr


def test_checkpoints_are_read(here):
    done = here("convert", "checkpoint/1", "weights.safetensors", "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["num_tensors"] == 8


@pytest.mark.parametrize("day", ["2026-11-21", "2026-11-23"])
def test_kept_answers_of_earlier_versions_are_searched_again(here, tmp_path, day):
    """A cache: an entry of another form is no answer and no error."""
    asked = ("search", "model.py", "--gpus", 2, "--global-batch", 16, "--pp", 2, *H100, "--json")
    first = here(*asked)
    assert first.code == 0, first.stderr
    (entry,) = (tmp_path / "cache" / "planner" / "plans").glob("*.json")
    shutil.copy(FORMATS / f"cache/{day}.json", entry)
    again = here(*asked)
    assert again.code == 0, again.stderr
    before, after = (json.loads(done.stdout)["plan"] for done in (first, again))
    assert before == after


@pytest.mark.parametrize(("path", "says"), [
    ("plan/2.json", "reads up to"), ("profile/3/profile.json", "profile again"),
    ("run/3/rank_00000.jsonl", "not a timeline of version"),
    ("checkpoint/1/000001-step-3/planner.json", "has checkpoint version 99"),
])  # fmt: skip
def test_files_of_a_later_version_are_refused(here, tmp_path, path, says):
    file = tmp_path / path
    head, *rest = file.read_text().split("\n") if "jsonl" in path else [file.read_text()]
    file.write_text("\n".join([json.dumps(json.loads(head) | {"version": 99}), *rest]))
    words = {
        "plan": ("show", path), "profile": ("profile", "show", "profile/3"),
        "run": ("timeline", "run/3"), "checkpoint": ("convert", "checkpoint/1", "w.safetensors"),
    }[path.split("/")[0]]  # fmt: skip
    assert says in here(*words).complaint
