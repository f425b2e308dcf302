"""`planner show`: a plan for people."""

import re
import subprocess
import sys

import pytest

from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan


@pytest.fixture
def saved(planner, write_model, tmp_path):
    """Make model.py and a plan.json for it with the degrees given; return the plan."""

    def save(**degrees):
        from planner.capture.source.capture_cache import load_graph

        path = write_model()
        plan = default_plan(load_graph(path), file="model.py", **degrees)
        save_plan(plan, tmp_path / "plan.json")
        return plan

    return save


def test_show_names_the_decisions(planner, saved):
    saved(dp=2, tp=2, pp=2, microbatch_size=3, num_microbatches=4, zero_stage=1)
    text = planner("show", "plan.json").stdout
    assert "8 = dp 2 · cp 1 · tp 2 · pp 2 · vpp 1" in text
    assert "24 samples = dp 2 x 4 microbatches of 3" in text
    assert "F0 " in text  # the timetable
    assert text.count(" O ") == 2  # each pp rank's optimizer


def test_show_with_the_model_names_blocks_and_parameters(planner, saved):
    """M12 in short: which parameters lie split, by name, and how many ops can't be split."""
    saved(tp=2, pp=2)
    text = planner("show", "plan.json", "model.py").stdout
    assert "layers" in text
    assert "S(0)" in text or "S(1)" in text
    assert "Every op has a sharding rule." in text
    assert re.search(r"B\s+backward\s+8 .* weight gradients of products", text)
    assert re.search(r"O\s+optimizer\s+2 .* \d+ parameters", text)


def test_show_prints_the_estimate_in_parts(planner, saved, tmp_path):
    estimate = {
        "step_s": 0.04,
        "peak_bytes": 3 * 2**20,
        "time": {"compute_s": 0.03, "bubble_s": 0.01, "tp_comm_s": 0.0},
        "memory": [{"weights_bytes": 2**20, "gradients_bytes": 2**21}],
        "source": "measured here",
        "relative_error": 0.1,
    }
    save_plan(saved().model_copy(update={"estimate": estimate}), tmp_path / "plan.json")
    text = planner("show", "plan.json").stdout
    assert "compute" in text
    assert "75.0%" in text
    assert "3.00 MiB" in text
    assert "tensor parallel" not in text
    assert "waiting for other stages" in text  # as older plans told it
    assert "within 10%" in text


def test_estimate_and_show_tell_parts_by_cause_and_an_interval_of_memory(planner, saved, tmp_path):
    """As the search's screen does: the same words, the slowest stage by name."""
    saved(pp=2, num_microbatches=4, microbatch_size=2)
    done = planner("estimate", "plan.json", "model.py", "--profile", "h100-sxm5-80gb")
    told = " ".join(done.stdout.split())
    assert "fill and drain" in told
    assert "Bottleneck: pp rank" in told
    assert ", blocks " in told
    assert re.search(r"The fullest: \S+ GiB to \S+ GiB in 4 of 5 cases, from dry runs", told)
    found = planner("search", "model.py", "--gpus", 2, "--profile", "h100-sxm5-80gb", "--pp", 2,
                    "--memory-limit", 3, "--global-batch", 16)  # fmt: skip
    assert found.code == 0, found.stderr
    shown = " ".join(planner("show", "plan.json").stdout.split())
    assert "fill and drain" in shown
    assert "Bottleneck: pp rank" in shown
    assert "The fullest: " in shown


def test_memory_that_may_pass_its_limit_is_told(planner, saved, tmp_path):
    plan = saved()
    told = {
        "step_s": 1.0, "peak_bytes": 97, "time": {"compute_s": 1.0},
        "memory": [{"total_bytes": 97}], "source": "measured",
        "memory_interval": {
            "low_bytes": 90, "high_bytes": 101, "limit_bytes": 100, "total_bytes": 97,
            "basis": "dry runs",
        },
    }  # fmt: skip
    save_plan(plan.model_copy(update={"estimate": told}), tmp_path / "plan.json")
    printed = " ".join(planner("show", "plan.json").stdout.split())
    assert "fullest device has 100 B and needs more than 101 B" in printed
    told["memory_interval"]["high_bytes"] = 99
    save_plan(plan.model_copy(update={"estimate": told}), tmp_path / "plan.json")
    assert "memory is tight" not in planner("show", "plan.json").stdout


def test_show_needs_no_torch(planner, saved, tmp_path):
    saved(pp=2)
    code = (
        "import cli, sys; code = cli.run(['show', 'plan.json']);"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_simulate_draws_the_timetable(planner, saved):
    """The same table that runs: drawn to scale, with each rank's work and waiting."""
    saved(pp=2, num_microbatches=4, microbatch_size=2)
    done = planner("simulate", "plan.json", "model.py", "--profile", "h100-sxm5-80gb")
    assert done.code == 0, done.stderr
    assert "rank 1 | " in done.stdout
    assert "bubble" in done.stdout


def test_estimate_takes_another_runtime(planner, saved):
    """E: the same plan with what lies between products fused; unknown runtimes are refused."""
    saved(dp=2)
    asked = ("estimate", "plan.json", "model.py", "--profile", "a100-sxm4-80gb", "--execution")
    fused, eager = planner(*asked, "ours-compiled"), planner(*asked, "ours-eager")
    assert fused.code == eager.code == 0, fused.stderr
    assert fused.stdout != eager.stdout
    other = planner(*asked, "megatron-core")
    assert other.code == 0
    # Ours from the profile's errors, others' from those of the runs published of them.
    widths = [
        re.search(r"expected to be within (\d+)% in 4 of 5 cases", " ".join(each.stdout.split()))
        for each in (eager, other)
    ]
    assert all(width is not None and 3 < int(width[1]) < 40 for width in widths)
    assert widths[0][1] != widths[1][1]
    assert "did you mean 'nanotron'" in planner(*asked, "nanotrn").complaint


def test_a_search_for_another_runtime_says_so(planner, saved):
    """In its answer, its file and what shows it; no steps of ours decide."""
    saved(dp=2)
    asked = ("search", "model.py", "--gpus", "2", "--profile", "a100-sxm4-80gb")
    found = planner(*asked, "--execution", "megatron-core", "--out", "other.json")
    assert found.code == 0, found.stderr
    told = " ".join(found.stdout.split())
    assert "as megatron-core runs it" in told
    assert "planner emit other.json model.py --to" in told
    shown = planner("show", "other.json", "model.py").stdout
    assert "priced for" in shown
    assert "as megatron-core runs it" in shown.replace("\n", " ")
    again = planner("estimate", "other.json", "model.py", "--profile", "a100-sxm4-80gb")
    assert "as megatron-core runs it" in again.stdout.replace("\n", " ")
    refused = planner(*asked, "--execution", "nanotron", "--measure", "2")
    assert "--measure runs plans as ours-eager" in refused.complaint
    launched = planner("launch", "other.json", "no.py")
    assert "is priced for megatron-core; this is ours-eager" in launched.stderr


def test_estimate_answers_for_another_machine(planner, saved):
    saved(dp=2)
    done = planner("estimate", "plan.json", "model.py", "--profile", "a100-sxm4-80gb")
    assert "a100-sxm4-80gb" in done.stdout
    assert "not on measurements here" in done.stdout.replace("\n", " ")
