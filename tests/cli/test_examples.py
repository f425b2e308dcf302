"""The examples as a newcomer reads them."""

import ast
import difflib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_training_under_a_plan_changes_three_lines():
    """D21: zero lines in the model, at most three in the training script, either way round."""
    single = (EXAMPLES / "train_single.py").read_text().splitlines()
    parallel = (EXAMPLES / "train.py").read_text().splitlines()
    changes = [line for line in difflib.ndiff(single, parallel) if line[0] in "+-"]
    assert sum(line[0] == "+" for line in changes) == 3
    assert sum(line[0] == "-" for line in changes) <= 3


def test_model_is_ordinary_pytorch():
    """M22, D22: the model imports torch and nothing else, ours least of all."""
    tree = ast.parse((EXAMPLES / "gpt.py").read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"torch"}


@pytest.mark.slow
def test_hugging_face_example_is_planned_for_64_gpus(planner):
    """X8 in short: an unmodified 8B model, planned without a GPU or its weights."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    done = planner(
        *("search", EXAMPLES / "llama.py", "--gpus", 64, "--profile", "h100-sxm5-80gb"),
        *("--global-batch", 512, "--tp", 2, "--pp", 1),
    )
    assert done.code == 0, done.stderr
    assert "Best plan: llama on 64 NVIDIA H100 80GB HBM3: dp 32 x tp 2," in done.stdout


@pytest.mark.slow
# peft reads it.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_are_planned_and_verified(planner, tmp_path):
    """N18 in short: LoRA through peft; `tests/test_examples.py` trains it."""
    pytest.importorskip("peft")
    subprocess.run([sys.executable, EXAMPLES / "finetune.py", "base"], check=True, cwd=tmp_path)
    model, plan = EXAMPLES / "lora.py", tmp_path / "plan.json"
    done = planner("search", model, "--gpus", 2, "--profile", "h100-sxm5-80gb", "--global-batch", 8,
                   "--tp", 2, "--out", plan)  # fmt: skip
    assert done.code == 0, done.stderr
    done = planner("verify", plan, model)
    assert done.code == 0, done.stderr
