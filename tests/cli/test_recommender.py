"""M26: examples/recommender.py, as its docstring says: tables are cut where they must be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.plan import load_plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "recommender.py"


BY_ROWS = "S(0),S(0)->S(0)"
"""A table by rows, indices and results by samples."""


def lookups_of(folder: Path) -> dict[str, str]:
    ops = [op for layout in load_plan(folder / "plan.json").layouts for op in layout.ops]
    return {name: str(how) for name, how in ops if name.startswith("embedding")}


def planner(folder: Path, *words: object, rows: int, steps: int = 60) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *map(str, words)],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "ROWS": str(rows),
            "WIDTH": "16",
            "STEPS": str(steps),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_tables_that_do_not_fit_are_cut_by_rows(tmp_path):
    """Two tables of 2.6 GB train in 20 GB with their gradients and Adam's state: over 8 GiB."""
    search = ("search", EXAMPLE, "--gpus", 4, "--profile", "h100", "--memory-limit", 8)
    planner(tmp_path, *search, rows=40_000_000)
    lookups = lookups_of(tmp_path)
    assert load_plan(tmp_path / "plan.json").tp == 4
    assert lookups == {"embedding": BY_ROWS, "embedding_2": BY_ROWS, "embedding_3": BY_ROWS}


@pytest.mark.timeout(600)
def test_a_plan_with_tables_cut_by_rows_is_proven_and_trains(tmp_path):
    """Small tables would be whole: pins cut them."""
    pins = [word for table in ("users", "items") for word in ("--pin", f"{table}.weight: S(0)@tp")]
    search = ("search", EXAMPLE, "--gpus", 4, "--tp", 4, "--profile", "h100", *pins)
    planner(tmp_path, *search, "--global-batch", 64, rows=200)
    assert set(lookups_of(tmp_path).values()) == {BY_ROWS}
    proof = planner(tmp_path, "verify", "plan.json", EXAMPLE, rows=200)
    assert "4 ranks compute the same as one process" in proof
    shown = planner(tmp_path, "launch", "plan.json", EXAMPLE, rows=200)
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", shown)]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
