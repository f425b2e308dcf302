"""`planner profile` from end to end, on workers that answer at once (M2, X7)."""

import pytest

from profiles.measure import measure as measuring
from profiles.measure import rounds
from tests.profiles.fake_workers import FakeWorkers
from tests.profiles.probes import a_few_probes, few_collectives


@pytest.fixture
def asked(monkeypatch):
    """Return the tasks that workers were given."""
    tasks = []

    class Workers(FakeWorkers):
        def call(self, task, *, timeout_s):
            tasks.append(task)
            return super().call(task, timeout_s=timeout_s)

    monkeypatch.setattr(measuring, "WorkerGroup", Workers)
    monkeypatch.setattr(measuring, "standard_grid", a_few_probes)
    monkeypatch.setattr(measuring, "collective_probes", few_collectives)
    monkeypatch.setattr(rounds, "PASSES", 1)
    return tasks


@pytest.mark.slow
def test_a_model_is_measured_in_bf16_with_compiled_blocks_beside_the_grid(
    planner, write_model, asked, tmp_path
):
    options = ("--out", "p", "--device", "cpu", "--nproc", 2)
    model = write_model()
    first = planner("profile", model, "--precision", "bf16", "--compiled", "--grid", *options)
    assert first.code == 0, first.stderr
    probes = [task["probe"] for task in asked if task["task"] == "op"]
    assert {probe["compiled"] for probe in probes if "program" in probe} == {False, True}
    dtypes = {tensor["dtype"] for probe in probes for tensor in probe["tensors"]}
    assert {"bfloat16", "float32"} <= dtypes
    shown = planner("profile", "show", "p", "--plots", "plots.html")
    assert shown.code == 0
    for part in (
        "whole blocks",
        "compiled blocks",
        "time by size of the full tensor",
        "slowdown",
        "worst fits",
        "adamw",
    ):
        assert part in shown.stdout
    assert (tmp_path / "plots.html").stat().st_size > 10**5
    assert planner("profile", "--check", "p").stdout == "p is a complete profile\n"
    asked.clear()
    assert planner("profile", model, "--precision", "bf16", "--compiled", "--grid", *options)
    assert {task["task"] for task in asked} == {"describe"}


def test_more_devices_than_ranks_are_told_at_once(planner, asked, tmp_path):
    """Before anything is measured; a search then says the same."""
    options = ("--out", "p", "--device", "cpu", "--budget", "1s")
    told = planner("profile", "--gpus", 4, "--nproc", 2, *options).stderr
    assert "--gpus 4 was given, and 2 ranks are measured" in told
    assert "refuse more than 2 devices" in told
    for enough in (("--gpus", 2, "--nproc", 2), ("--gpus", 3)):
        assert "ranks are measured" not in planner("profile", *enough, *options).stderr


def test_a_precision_that_is_none_is_refused(planner, write_model, asked):
    complaint = planner("profile", write_model(), "--precision", "fp4").complaint
    assert "--precision fp4 was given; use model, bf16, fp16, fp8, " in complaint
    assert not asked


def test_show_says_what_it_takes(planner):
    assert (
        "prints one profile; give one directory or shipped name"
        in planner("profile", "show").complaint
    )


def test_an_unknown_precision_is_refused_before_anything_is_measured(planner, asked):
    complaint = planner("profile", "--precision", "fp99").complaint
    assert "fp99 was given; use model, bf16, fp16, fp8, fp8-tensorwise or mxfp8;" in complaint
    assert not asked


def test_check_of_what_is_no_profile(planner, tmp_path):
    done = planner("profile", "--check", tmp_path)
    assert done.code == 1
    assert "profile.json" in done.stdout
