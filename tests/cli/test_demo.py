"""X14: a first run without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_demo(tmp_path):
    """Profiles, searches, trains and compares (85 s on two quiet cores)."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step time" in done.stdout
    assert "peak memory" in done.stdout
    losses = json.loads((tmp_path / "train-rank0.json").read_text())["loss"]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1  # it learns to tell likely bytes from others
