"""What `planner search` says beside the plan it found."""

import json
import re
from pathlib import Path

import pytest

from planner.runtime.proofs.trials import Trial

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


SEQUENCES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.token(ids)).flatten(0, 1), ids.flatten())


def model():
    return Model()


def batch(size, length=16):
    return {"ids": torch.zeros(size, length, dtype=torch.long)}
"""


def test_other_lengths_are_part_of_the_plan(planner, tmp_path):
    """N19: those shorter than what batch(size) makes, once each, and no longer ones."""
    path = tmp_path / "sequences.py"
    path.write_text(SEQUENCES)
    found = planner("search", path, *SEARCH, "--lengths", "8,4,16")
    assert found.code == 0
    buckets = json.loads(Path("plan.json").read_text())["model"]["buckets"]
    assert [bucket["inputs"][0][2][1] for bucket in buckets] == [4, 8]
    assert "also takes  ids [n, 4]" in planner("show", "plan.json", path).stdout
    longer = planner("search", path, *SEARCH, "--lengths", "8,32")
    assert longer.code == 2
    assert "ids has 32 entries in a bucket and 16 in the plan's own shapes" in longer.stderr
    without = tmp_path / "without.py"
    without.write_text(SEQUENCES.replace(", length=16", "").replace("length", "16"))
    refused = planner("search", without, *SEARCH, "--lengths", "8")
    assert refused.code == 2
    assert "batch(2, 8) failed" in refused.stderr


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


@pytest.fixture
def centred(write_model):
    """A model that sorts the batch in each layer, and drops some: no replica draws for all."""
    path = write_model()
    text = path.read_text()
    assert text.count("nn.Linear(8, 8)") == 1
    path.write_text(
        text.replace("nn.Linear(8, 8)", "nn.Sequential(nn.Linear(8, 8), Centred())")
        + "\n\nclass Centred(nn.Module):\n    def forward(self, x):\n"
        "        return nn.functional.dropout(x.sort(0).values, 0.1)\n"
    )
    return path


STAYS_WHOLE = "the batch stays whole: values are computed across samples (sort in block"


def test_a_batch_that_the_model_computes_across_stays_whole(planner, centred, forked_ranks):
    """N1: the op, its block and the user's line; the same from a kept capture."""
    for _ in range(2):
        found = planner("search", centred, *SEARCH)
        assert found.code == 0, found.stderr
        told = " ".join(found.stdout.split())
        assert f"{STAYS_WHOLE}s layers.0" in told
        assert (
            f"{centred.name}:{len(centred.read_text().splitlines())}: `return nn.functional."
            in told
        )
        assert "--accept local-samples lets it be cut" in told
        plan = json.loads(Path("plan.json").read_text())
        assert (plan["dp"], plan["num_microbatches"], "accept" in plan) == (1, 1, False)
    assert planner("verify", "plan.json", centred, "--device", "cpu", "--steps", 1).code == 0


def test_choices_that_cut_a_whole_batch_are_refused_at_once(planner, centred):
    for given in (["--dp", 2], ["--microbatch-size", 2], ["--dp", 2, "--microbatch-size", 2]):
        refused = planner("search", centred, *SEARCH, *given, "--out", "no.json")
        assert refused.code == 2
        (line,) = refused.stderr.splitlines()
        assert "which would cut the batch of 8 samples into " in line
        assert "values are computed across samples (sort in block" in line
        assert line.endswith("or accept it: --accept local-samples")
    assert not Path("no.json").exists()
    given = ["--forbid", "pp=2", "--forbid", "tp=2"]
    refused = planner("search", centred, *SEARCH, *given)
    assert refused.code == 2
    assert "unless you accept it: --accept local-samples; or use fewer devices" in refused.stderr
    refused = planner("why", centred, *SEARCH, "--dp", 2)
    assert (refused.code, STAYS_WHOLE in refused.stderr) == (2, True)


def test_a_cut_that_is_accepted_is_noted_and_recorded(planner, centred, forked_ranks):
    given = ["--dp", 2, "--accept", "local-samples"]
    cut = planner("search", centred, *SEARCH, *given)
    assert cut.code == 0, cut.stderr
    assert "values are computed across samples (sort in blocks layers.0" in cut.stderr
    plan = json.loads(Path("plan.json").read_text())
    assert plan["accept"] == ["local-samples"]
    assert planner("verify", "plan.json", centred, "--device", "cpu", "--steps", 1).code == 0
    del plan["accept"]
    Path("plan.json").write_text(json.dumps(plan))
    for how in (["--device", "cpu"], ["--by-block"]):
        refused = planner("verify", "plan.json", centred, *how)
        assert refused.code == 2
        assert refused.stderr.count("\n") == 1
        assert "the plan cuts a batch of 8 samples into 2 parts (dp=2, " in refused.stderr
    refused = planner("search", centred, *SEARCH, "--accept", "local")
    assert refused.code == 2
    assert "--accept local was given; use local-samples, local-buffers or" in refused.stderr


def test_the_measured_best_is_written(planner, write_model, monkeypatch):
    """N18: of the two best plans the second was faster; the file says so, and `show` does."""

    def trials(plans, graph, model_file, *, device, **_):
        assert (len(plans), device) == (2, "cuda")
        return tuple(Trial(turns_s=(float(5 - index), 6.0, 1.0)) for index in range(len(plans)))

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("planner.runtime.proofs.trials.run_trials", trials)
    path = write_model()
    found = planner("search", path, *SEARCH, "--measure", 2)
    assert found.code == 0, found.stderr
    assert "2 plans in turns on 2 GPU ranks of this machine" in found.stderr
    assert "measured: 4 s a step" in found.stdout
    measured = json.loads(Path("plan.json").read_text())["estimate"]["measured"]
    assert [plan["measured_s"] for plan in measured["compared"]] == [5.0, 4.0]
    shown = planner("show", "plan.json").stdout
    assert "Measured: 4 s a step, the median of 3 turns; the fastest of 2 plans" in shown


def test_plans_for_devices_that_are_not_here_are_refused_unsearched(planner, write_model):
    refused = planner("search", write_model(), *SEARCH, "--measure", 2, "--out", "no.json")
    assert "--measure can't run plans for h100-sxm5-80gb here" in refused.complaint
    assert not Path("no.json").exists()


def test_samples_that_belong_together_are_told(planner, write_model):
    """The line that shows them, in a search and a plan; sizes that cut them are refused by name."""
    path = write_model(body="a, b = x.chunk(2); x = a - b")
    found = planner("search", path, *SEARCH, "--dp", 2, "--microbatch-size", 2)
    assert found.code == 0, found.stderr
    told = "samples belong together in pairs (halves stacked), as chunk at "
    assert told in found.stderr
    assert "chunk(2); x = a - b` shows: replicas and microbatches take whole ones" in found.stderr
    assert "computed across samples" not in found.stderr
    data = json.loads(Path("plan.json").read_text())
    assert (data["microbatch_size"], data["num_microbatches"]) == (2, 2)
    shown = " ".join(planner("show", "plan.json").stdout.split())
    assert "8 samples = dp 2 x 2 microbatches of 2" in shown
    assert told in shown
    search = ("search", path, *SEARCH[:-1])
    assert planner(*search, 9).complaint.endswith(
        "--global-batch 9 was given; samples belong together in pairs (halves stacked), so it must "
        "be a multiple of 2: use 8 or 10"
    )
    assert "--microbatch-size 1 was given; samples belong together" in (
        planner(*search, 8, "--microbatch-size", 1).complaint
    )
    refused = planner(*search, 12, "--dp", 2, "--microbatch-size", 4).complaint
    assert "--microbatch-size 4 does not divide the 6 samples of a replica" in refused
    assert refused.endswith("use a divisor: 2, 6")
    assert "use --meshes same" in planner(*search, 8, "--meshes", "own").complaint
