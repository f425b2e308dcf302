"""M2, P14: what a package or a file of a user's adds is there in commands, ranks and scripts."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from planner import plugins
from planner.capture.source.capture_cache import load_graph
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import load_plan, save_plan
from planner.language.schedule.registry import SCHEDULES
from planner.plugins import GROUP, PLUGIN_FILES, load_plugins, name_files, plugin_digests

LAST_FIRST = """
from planner.language.schedule import (forward, full_backward, register_schedule)

@register_schedule("last_first", summary="every forward, then backward from the newest")
def last_first(pp, vpp, num_microbatches):
    order = range(num_microbatches)
    return [
        [forward(rank, i) for i in order] + [full_backward(rank, i) for i in reversed(order)]
        for rank in range(pp)
    ]
"""

SCRIPT = """
from planner.language.schedule.registry import SCHEDULES
assert "last_first" in SCHEDULES
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Plugins of a test are gone after it."""
    monkeypatch.setenv(PLUGIN_FILES, "")
    monkeypatch.setattr(plugins, "_loaded", {})
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)


def test_a_schedule_of_a_file_is_searched_shown_and_known_to_ranks(
    planner, write_model, tmp_path, forked_ranks
):
    model, own, plan = write_model(), tmp_path / "own.py", tmp_path / "plan.json"
    own.write_text(LAST_FIRST)
    with_plugin = ["--plugin", str(own)]
    search = ["search", model, "--gpus", "2", "--pp", "2", "--schedule", "last_first"]
    search += ["--global-batch", "8", "--profile", "h100-sxm5-80gb", "--out", plan]
    found = planner(*with_plugin, *search)
    assert found.code == 0, found.stderr
    assert load_plan(plan).schedule == "last_first"
    assert "last_first" in planner(*with_plugin, "show", plan).stdout

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = tmp_path / "alone.json"
    save_plan(default_plan(load_graph(model), microbatch_size=2), alone)
    assert planner(*with_plugin, "launch", "--device", "cpu", alone, script).code == 0


def test_a_plan_without_its_plugin_says_what_is_missing(planner, write_model):
    refused = planner("search", write_model(), "--gpus", "2", "--schedule", "last_first").complaint
    assert "'last_first' is unknown" in refused
    assert "planner --plugin" in refused


def test_a_package_names_its_plugin_as_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "their_schedules.py").write_text(LAST_FIRST)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nschedules = their_schedules\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    load_plugins()
    load_plugins()  # once: the name of a schedule can't be taken twice
    assert "last_first" in SCHEDULES
    sys.modules.pop("their_schedules")


def test_answers_of_a_search_differ_by_the_source_of_plugins(tmp_path):
    own = tmp_path / "own.py"
    digests = set()
    for source in ("limit = 1", "limit = 2"):
        own.write_text(source)
        plugins._loaded.clear()
        name_files([own])
        load_plugins()
        digests.add(plugin_digests())
    assert len(digests) == 2
    assert os.environ[PLUGIN_FILES] == str(own)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("\nimport no_such_package", r"No module named 'no_such_package' \(.*own.py:2\)"),
        ("def f(:", "can't be imported: SyntaxError"),
        (LAST_FIRST.replace("last_first", "1f1b", 1), "'1f1b' is registered already"),
    ],
)
def test_a_plugin_that_fails_is_named_in_one_line(source, told, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(source)
    name_files([own])
    with pytest.raises(PlannerError, match=told):
        load_plugins()
    with pytest.raises(PlannerError, match="no plugin"):
        name_files([tmp_path / "nothing.py"])
