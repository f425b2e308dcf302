"""Which kernels blocks run: what searches compare, plans say, and launches hand on."""

import json
import os
from pathlib import Path

from planner.language.plan import load_plan
from planner.runtime.process.environment import KERNELS, LAUNCHED
from planner.runtime.process.launched import followed_plan
from profiles import load_profile
from profiles.store import write_profile_file
from tests.cli.test_search_notes import SEARCH


def test_auto_takes_the_kernels_that_are_priced_faster(planner, write_model):
    """On a GPU, compiled blocks start fewer kernels."""
    path = write_model()
    found = planner("search", path, *SEARCH, "--kernels", "auto")
    assert found.code == 0, found.stderr
    assert "kernels: eager " in found.stderr
    assert "compiled blocks" in found.stdout
    plan = load_plan("plan.json")
    assert (plan.kernels, plan.execution) == ("compiled", "ours-compiled")
    assert "compiled blocks" in planner("show", "plan.json").stdout
    eager = planner("search", path, *SEARCH, "--kernels", "eager", "--out", "eager.json")
    assert eager.code == 0
    said = json.loads(Path("eager.json").read_text())
    assert "kernels" not in said, "what is usual need not be said"
    assert load_plan("eager.json").kernels == "eager"
    assert said["estimate"]["step_s"] > plan.estimate["step_s"]


def test_a_machine_whose_compiled_blocks_were_measured_has_both_compared(
    planner, write_model, tmp_path
):
    path, h100 = write_model(), load_profile("h100-sxm5-80gb").file
    usual = h100.launch_overhead_s.model_copy(update={"value": 0.9})
    measured = {"compiled_block_correction": {"forward": usual, "backward": usual}}
    (tmp_path / "here").mkdir()
    write_profile_file(tmp_path / "here", h100.model_copy(update=measured))
    asked = ("--profile", "here", "--gpus", 2, "--global-batch", 8)
    found = planner("search", path, *asked)
    assert "kernels: eager " in found.stderr, found.stderr
    assert load_plan("plan.json").kernels == "compiled"
    assert planner("search", path, *asked, "--kernels", "eager").code == 0
    assert load_plan("plan.json").kernels == "eager"


def test_kernels_that_are_not_there_are_refused(planner, write_model):
    path = write_model()
    complaint = planner("search", path, *SEARCH, "--kernels", "fast").complaint
    assert "--kernels fast was given; use auto, eager, compiled" in complaint
    both = planner("search", path, *SEARCH, "--kernels", "eager", "--execution", "ours-compiled")
    assert "says how blocks run on ours-eager; drop one of them" in both.complaint
    why = planner("why", path, *SEARCH, "--kernels", "auto").complaint
    assert "--kernels auto was given, and why compares plans of one kind" in why
    assert planner("search", path, *SEARCH).code == 0
    launched = planner("launch", "--kernels", "fast", "plan.json", path).complaint
    assert "--kernels fast was given; use eager or compiled" in launched


def test_work_beside_collectives_is_of_our_runtime_alone(planner, write_model):
    path = write_model()
    asked = "search", path, *SEARCH, "--overlap", "auto"
    refused = planner(*asked, "--execution", "megatron-core").complaint
    assert "--overlap auto was given with --execution" in refused
    assert "plan for ours-eager" in refused
    for kernels in ("compiled", "auto"):
        found = planner(*asked, "--kernels", kernels)
        assert found.code == 0, found.stderr


def test_a_launch_hands_its_kernels_on(planner, write_model, monkeypatch):
    path = write_model()
    assert planner("search", path, *SEARCH).code == 0
    handed = {}
    monkeypatch.setattr(
        "planner.runtime.start.launch.run_workers", lambda *_, extra, **__: handed.update(extra)
    )
    launched = planner("launch", "--kernels", "compiled", "--device", "cpu", "plan.json", path)
    assert handed[KERNELS] == "compiled"
    assert "is priced for ours-eager; this is ours-compiled" in launched.stderr
    assert followed_plan("plan.json").kernels == "eager"
    monkeypatch.setenv(KERNELS, handed[KERNELS])
    assert followed_plan("plan.json").kernels == "compiled"
    monkeypatch.setenv(LAUNCHED, os.path.abspath("plan.json"))
    assert followed_plan("plan.json").kernels == "compiled"
    beside = json.loads(Path("plan.json").read_text()) | {"overlap": "input-gradients"}
    Path("plan.json").write_text(json.dumps(beside))
    launched = planner("launch", "--kernels", "compiled", "--device", "cpu", "plan.json", path)
    assert launched.code == 0
    followed = followed_plan("plan.json")
    assert (followed.kernels, followed.overlap) == ("compiled", "input-gradients")
