"""Benchmarks are run by hand, and what they use moves: each runs here, for a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Literal

import pytest

from benchmarks import harness
from benchmarks.harness import ROOT, Result, all_benchmarks, benchmark, in_turns, main, on_worlds
from benchmarks.published import PUBLISHED

NAMES = [found.name for found in all_benchmarks()]

LONGEST_S = 1200
"""A quick run takes 20 seconds of a machine that does nothing else; this ends one that hangs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_has_rows(name):
    module = harness.find_benchmark(name).run.__module__
    if module.startswith("benchmarks.published.") and not PUBLISHED.exists():
        pytest.skip(f"needs the published tables in {PUBLISHED}")
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["rows"]
    assert not [row for row in record["rows"] if row.get("failed")]
    assert record["date"]
    assert record["machine"]


def test_the_command_lists_each_file_that_is_a_benchmark(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in NAMES:
        assert any(line.startswith(f"{name} ") and line.endswith(".") for line in lines), name
    assert {"accuracy", "search", "predict_cpu"} <= set(NAMES)
    modules = [found.run.__module__ for found in all_benchmarks()]
    assert all(ROOT.joinpath(f"{module.replace('.', '/')}.py").exists() for module in modules)


def test_names_without_a_benchmark_are_refused(capsys):
    assert main(["nothing"]) == 2
    assert "no benchmark is called nothing" in capsys.readouterr().err


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(harness, "BENCHMARKS", {})

    @benchmark("toy", quick={"sizes": (1,)})
    def toy(
        *,
        sizes: Annotated[tuple[int, ...], "of rows"] = (1, 2),
        kind: Literal["a", "b"] = "a",
        limit: float | None = None,
        fails: bool = False,
    ) -> Result:
        """Rows of so many sizes."""
        return Result([{"size": n, "kind": kind, "limit": limit} for n in sizes], failed=fails)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ([], [(1, "a", None), (2, "a", None)]),
        (["--quick"], [(1, "a", None)]),
        (["--quick", "--sizes", "3", "4", "--kind", "b"], [(3, "b", None), (4, "b", None)]),
        (["--sizes", "3", "--limit", "0.5"], [(3, "a", 0.5)]),
    ],
)
def test_arguments_of_the_function_are_options_of_the_command(toy, capsys, arguments, rows):
    assert main(["toy", "--json", *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [tuple(row.values()) for row in record["rows"]] == rows


def test_rows_are_printed_and_written(toy, capsys, tmp_path):
    assert main(["toy", "--fails", "--out", str(tmp_path / "rows.csv")]) == 1
    assert (tmp_path / "rows.csv").read_text() == "size,kind,limit\n1,a,\n2,a,\n"
    assert capsys.readouterr().out.splitlines() == ["size  kind  limit", "   1  a     -",
                                                    "   2  a     -"]  # fmt: skip
    assert main(["toy", "--out", str(tmp_path / "rows.json")]) == 0
    assert json.loads((tmp_path / "rows.json").read_text())["benchmark"] == "toy"


def test_an_unknown_quick_argument_is_refused():
    with pytest.raises(TypeError, match="no arguments"):
        benchmark("toy", quick={"size": 1})(lambda: Result([]))


def test_sides_take_turns_in_alternating_order():
    order = []
    sides = {side: lambda side=side: order.append(side) or len(order) for side in "ab"}
    assert in_turns(sides, 2, warm_up=1) == {"a": [4, 5], "b": [3, 6]}
    assert order == ["a", "b", "b", "a", "a", "b"]


def _rank_and_size(world: str) -> tuple[str, int, int]:
    import torch.distributed as dist

    return world, dist.get_rank(), dist.get_world_size()


def test_worlds_of_ranks_run_at_once():
    found = on_worlds(2, _rank_and_size, [("first",), ("second",)])
    assert found == [[(world, rank, 2) for rank in range(2)] for world in ("first", "second")]
