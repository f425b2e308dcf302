"""M26: examples/recommender.py, as its docstring says: tables are cut where they must be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.language.plan import Plan, load_plan, save_plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "recommender.py"


def check_proven_and_trained(sized) -> None:
    """The plan computes what one process does, and its loss falls."""
    proof = sized("verify", "plan.json", EXAMPLE, rows=200)
    assert "4 ranks compute the same as one process" in proof
    shown = sized("launch", "plan.json", EXAMPLE, rows=200)
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", shown)]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]


def test_sparse_tables_that_do_not_fit_are_on_the_host(sized, tmp_path, monkeypatch):
    """M25, M27: without SPARSE they are cut over ranks, by the test below."""
    monkeypatch.setenv("SPARSE", "1")
    search = ("search", EXAMPLE, "--gpus", 4, "--profile", "h100", "--memory-limit", 4)
    sized(*search, rows=40_000_000)
    plan = load_plan(tmp_path / "plan.json")
    assert plan.tables_on_host == ("items.weight", "users.weight")


def test_a_plan_with_tables_on_the_host_is_proven_and_trains(
    sized, tmp_path, monkeypatch, forked_ranks
):
    monkeypatch.setenv("SPARSE", "1")
    search = ("search", EXAMPLE, "--gpus", 4, "--dp", 2, "--tp", 2, "--profile", "h100")
    sized(*search, "--offload", "tables", "--global-batch", 64, rows=200)
    check_proven_and_trained(sized)


BY_ROWS = "S(0),S(0)->S(0)"
"""A table by rows, indices and results by samples."""


def lookups_of(folder: Path) -> dict[str, str]:
    ops = [op for layout in load_plan(folder / "plan.json").layouts for op in layout.ops]
    return {name: str(how) for name, how in ops if name.startswith("embedding")}


@pytest.fixture
def sized(planner, monkeypatch):
    """Run a command on the example with so many rows and columns; return what it tells."""

    def run(*words: object, rows: int, width: int = 16) -> str:
        for name, value in {"ROWS": rows, "WIDTH": width, "STEPS": 60}.items():
            monkeypatch.setenv(name, str(value))
        done = planner(*words)
        assert done.code == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("width", "limit_gib", "dim"),
    [(16, 8, 1), (6, 4, 0)],
    ids=["by columns, which need no exchange", "by rows, as four do not divide the columns"],
)
def test_tables_that_do_not_fit_are_cut(sized, tmp_path, width, limit_gib, dim):
    """Two tables of 40 million rows train in four times their bytes: 20 and 8 GB."""
    search = ("search", EXAMPLE, "--gpus", 4, "--profile", "h100", "--memory-limit", limit_gib)
    sized(*search, rows=40_000_000, width=width)
    assert load_plan(tmp_path / "plan.json").tp == 4
    tables = {how.partition(",")[0] for how in lookups_of(tmp_path).values()}
    assert tables == {f"S({dim})"}


@pytest.mark.slow
def test_a_plan_with_tables_cut_by_rows_is_proven_and_trains(sized, tmp_path, forked_ranks):
    """Small tables would be whole: pins cut them, and each lookup is made an exchange of rows."""
    pins = [word for table in ("users", "items") for word in ("--pin", f"{table}.weight: S(0)@tp")]
    search = ("search", EXAMPLE, "--gpus", 4, "--tp", 4, "--profile", "h100", *pins)
    sized(*search, "--global-batch", 64, rows=200)
    plan = load_plan(tmp_path / "plan.json")
    layouts = tuple(
        layout.model_copy(
            update={
                "ops": tuple(
                    (name, BY_ROWS if name.startswith("embedding") else how)
                    for name, how in layout.ops
                )
            }
        )
        for layout in plan.layouts
    )
    data = plan.model_copy(update={"layouts": layouts}).model_dump(mode="json")
    save_plan(Plan.model_validate(data), tmp_path / "plan.json")
    assert set(lookups_of(tmp_path).values()) == {BY_ROWS}
    check_proven_and_trained(sized)
