"""N22: the examples of loops that stay as they are, by commands, against one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

SCRIPTS = {
    "trainer": ("trainer.py", r"'?(?:loss|evaluation:|eval_loss)'?:? '?(\d+\.\d+)", ()),
    "prepared": ("gpt.py", r"loss (\d+\.\d+)", ()),
    "ordinary": ("gpt.py", r"(?:loss|norm|held out) (\d+\.\d+)", ("--unmodified",)),
}
"""By script: its model file, how it says losses, and how it is launched."""


def said(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--pp", "2"), ("--dp", "2"), ("--tp", "2")])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_the_losses_of_one_process(tmp_path, name, layout):
    if name == "trainer":
        pytest.importorskip("accelerate")
    model, pattern, options = SCRIPTS[name]
    script = str(EXAMPLES / f"{name}.py")
    planner = ("-c", "import cli; cli.main()")
    sizes = ("--gpus", "2", *layout, "--global-batch", "8", "--profile", "h100-sxm5-80gb")
    said(tmp_path, *planner, "search", str(EXAMPLES / model), *sizes)
    run = said(tmp_path, *planner, "launch", "--device", "cpu", *options, "plan.json", script)
    found = [float(loss) for loss in re.findall(pattern, run)]
    expected = [float(loss) for loss in re.findall(pattern, said(tmp_path, script))]
    assert len(expected) > 3
    assert found == pytest.approx(expected, rel=1e-3)
