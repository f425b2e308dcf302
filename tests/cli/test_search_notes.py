"""What `planner search` says beside the plan it found."""

import json
import re
from pathlib import Path

import pytest

SEARCH = ("--profile", "h100-sxm5-80gb", "--gpus", 2, "--global-batch", 8)


def test_a_cut_batch_is_noted_by_module(planner, write_model):
    """P33: with two devices every plan by dp or microbatches cuts the batch of a BatchNorm."""
    path = write_model()
    path.write_text(
        path.read_text().replace(
            "nn.Linear(8, 8)", "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))"
        )
    )
    cut = planner("search", path, *SEARCH, "--dp", 2, "--microbatch-size", 2)
    assert cut.code == 0
    assert "BatchNorm layers.0.1, layers.1.1, layers.2.1 and 1 more: " in cut.stderr
    assert "8 samples into 4 parts (dp=2, num_microbatches=2)" in cut.stderr
    early = ("--receive-ahead", 3, "--out", "early.json")
    whole = planner("search", path, *SEARCH, "--tp", 2, "--microbatch-size", 8, *early)
    assert whole.code == 0
    assert "BatchNorm" not in whole.stderr
    assert json.loads(Path("early.json").read_text())["receive_ahead"] == 3  # P15


def test_what_would_fit_stands_beside_a_refusal(planner, write_model):
    """X2: the refusal is one line on stderr; what would do is a table on stdout."""
    path = write_model(width=1024)
    refused = planner("search", path, *SEARCH, "--memory-limit", "2.02", "--offload", "none")
    assert re.search(r"smallest limit that would fit is .* GiB", refused.complaint)
    assert "What would fit" in refused.stdout
    assert "--memory-limit" in refused.stdout
    assert "of 2.02 at the least: context 2.00" in refused.stdout


def test_cost_and_numbers_of_devices_are_compared(planner, write_model):
    """X4: a table of plans by time, memory, devices and cost, also as JSON."""
    done = planner(
        "search", write_model(), *SEARCH, "--price", 2.5, "--pareto-gpus", "1,2",
        "--pareto", "front.json",
    )  # fmt: skip
    assert done.code == 0
    assert "Time, memory, GPUs against cost" in done.stdout
    front = json.loads(Path("front.json").read_text())
    assert {point["num_devices"] for point in front} <= {1, 2}
    for point in front:
        assert point["cost_per_step"] == pytest.approx(
            2.5 * point["num_devices"] * point["step_s"] / 3600
        )


def test_own_meshes_of_one_tp_are_none(planner, write_model):
    """A fixed tp leaves stages nothing to choose, which is said rather than passed over."""
    found = planner("search", write_model(), *SEARCH, "--tp", 1, "--meshes", "own")
    assert found.code == 0, found.stderr
    assert "--meshes own with --tp 1" in found.stderr
    assert "--meshes" not in planner("search", write_model(), *SEARCH, "--meshes", "own").stderr


def test_what_computes_across_samples_is_noted_by_line(planner, write_model):
    """N1: the op, its block and the user's line; the same from a kept capture."""
    path = write_model()
    text = path.read_text()
    assert text.count("nn.Linear(8, 8)") == 1
    path.write_text(
        text.replace("nn.Linear(8, 8)", "nn.Sequential(nn.Linear(8, 8), Centred())")
        + "\n\nclass Centred(nn.Module):\n    def forward(self, x):\n        return x - x.mean(0)\n"
    )
    for _ in range(2):
        cut = planner("search", path, *SEARCH, "--dp", 2, "--microbatch-size", 2)
        assert cut.code == 0
        assert "values are computed across samples (mean in blocks layers.0" in cut.stderr
        assert f"{path.name}:{len(path.read_text().splitlines())}: `return x - x.mean(0)`" in (
            " ".join(cut.stderr.split())
        )
    whole = planner("search", path, *SEARCH, "--tp", 2, "--microbatch-size", 8)
    assert "across samples" not in whole.stderr
