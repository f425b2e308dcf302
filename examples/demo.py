"""The whole of planner on this machine's CPU: profile, search, launch, compare.

    python examples/demo.py [FOLDER]

Uses only the public commands, each as a person would type it, in FOLDER (demo-out).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
OUT = Path(*sys.argv[1:2] or [EXAMPLES.parent / "demo-out"]).resolve()
PLANNER = str(Path(sys.executable).with_name("planner"))
WARM_UP_STEPS = 3


def run(*command):
    """Show a planner command, run it in the folder, and stop the demo if it fails."""
    print("\n$ planner", *command, flush=True)
    code = subprocess.run([PLANNER, *command], cwd=OUT).returncode
    if code:
        sys.exit(code)


def main():
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(OUT / "profile", ignore_errors=True)  # a profile of another day may not fit
    for old in OUT.glob("train-rank*.json"):
        old.unlink()
    model = os.path.relpath(EXAMPLES / "gpt.py", OUT)
    script = os.path.relpath(EXAMPLES / "train.py", OUT)
    run("profile", model, "--gpus", "2", "--device", "cpu", "--budget", "60s", "--out", "profile")
    run("search", model, "--gpus", "2", "--profile", "profile", "--global-batch", "8")
    run("show", "plan.json")
    run("launch", "--device", "cpu", "plan.json", script)
    print_comparison()
    print(f"\ndemo took {time.monotonic() - began:.0f} s; its files are in {OUT}")


def print_comparison():
    """Set what the plan predicted beside what the ranks measured."""
    estimate = json.loads((OUT / "plan.json").read_text())["estimate"]
    ranks = [json.loads(file.read_text()) for file in sorted(OUT.glob("train-rank*.json"))]
    step_s = statistics.median(s for rank in ranks for s in rank["step_s"][WARM_UP_STEPS:])
    peak_gib = max(rank["peak_bytes"] for rank in ranks) / 2**30
    table = Table("", "predicted", "measured", "predicted / measured")
    for name, predicted, measured, unit in (
        ("step time", estimate["step_s"] * 1e3, step_s * 1e3, "ms"),
        ("peak memory", estimate["peak_bytes"] / 2**30, peak_gib, "GiB"),
    ):
        ratio = f"{predicted / measured:.2f}"
        shown = (f"{float(f'{value:.3g}'):,g} {unit}" for value in (predicted, measured))
        table.add_row(name, *shown, ratio)
    print()
    Console().print(table)


if __name__ == "__main__":
    main()
