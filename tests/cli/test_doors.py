"""B4: Commands on a config.json, a Megatron-LM script and a DeepSpeed json, as on a model file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doors.test_files import LLAMA, MEGATRON, TITAN


@pytest.fixture
def config() -> Path:
    pytest.importorskip("transformers")
    Path("tiny").mkdir()
    path = Path("tiny/config.json")
    path.write_text(json.dumps({**LLAMA, "torch_dtype": "float32"}))
    return path


def test_a_config_json_is_searched_proven_shown_and_written(planner, config) -> None:
    searched = planner(
        "search", config, "--seq-length", 8, "--gpus", 2, "--profile", "h100-sxm5-80gb", "--json",
        "--global-batch", 8, "--pp", 2,
    )  # fmt: skip
    assert searched.code == 0, searched.stderr
    told = json.loads(searched.stdout)
    assert "planner verify plan.json tiny/config.json --seq-length 8" in told["next"]
    assert json.loads(Path("plan.json").read_text())["model"]["name"] == "tiny"
    # The plan says how long a sample is.
    proven = planner("verify", "plan.json", "tiny", "--by-block")
    assert proven.code == 0, proven.stderr
    shown = planner("show", "plan.json", "tiny")
    assert "layers" in shown.stdout
    assert planner("emit", "plan.json", "tiny", "--to", "torchrun").code == 0
    compared = planner(
        "why", "tiny", "--seq-length", 8, "--gpus", 2, "--profile", "h100-sxm5-80gb", "--tp", 2,
        "--global-batch", 8,
    )  # fmt: skip
    assert compared.code == 0, compared.stderr


def test_a_script_says_devices_batch_and_runtime(planner) -> None:
    Path("train.sh").write_text(MEGATRON)
    searched = planner("search", "train.sh", "--profile", "h100-sxm5-80gb")
    assert searched.code == 0, searched.stderr
    plan = json.loads(Path("plan.json").read_text())
    assert plan["execution"] == "megatron-core"
    assert plan["precision"] == "bf16"


def test_keep_fixes_the_layout_that_a_script_has(planner) -> None:
    Path("train.sh").write_text(MEGATRON)
    kept = planner(
        "search", "train.sh", "--profile", "h100-sxm5-80gb", "--keep-layout", "--gpus", 8
    )
    assert kept.code == 0, kept.stderr
    plan = json.loads(Path("plan.json").read_text())
    assert plan["tp"] == plan["pp"] == 2
    assert plan["microbatch_size"] == 2
    assert plan["zero_stage"] == 1


def test_a_deepspeed_json_goes_beside_a_model(planner, config) -> None:
    Path("ds.json").write_text(
        json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3}})
    )
    found = planner(
        "search", config, "--seq-length", 8, "--gpus", 2, "--profile", "h100-sxm5-80gb",
        "--deepspeed", "ds.json", "--keep-layout",
    )  # fmt: skip
    assert found.code == 0, found.stderr
    plan = json.loads(Path("plan.json").read_text())
    assert plan["zero_stage"] == 3
    assert plan["dp"] == 2


def test_what_is_missing_is_told_in_a_line(planner, config) -> None:
    Path("titan.toml").write_text(TITAN)
    assert "give --seq-length" in planner("search", config, "--gpus", 2).complaint
    assert "--gpus was not given" in planner("search", "titan.toml").complaint
    assert "no layout to keep" in planner("why", config, "--seq-length", 8, "--gpus", 2,
                                          "--keep-layout").complaint  # fmt: skip
    assert "without a model" in planner("show", "plan.json", "--seq-length", 8).complaint
