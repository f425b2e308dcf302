"""How a plan's groups are made: each with the run's timeout, an axis at a time where that goes."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.language.lowering.defaults import default_plan
from planner.language.templates import Transformer, build_transformer
from planner.runtime.process.groups import splitting
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.process.groups.splitting import can_split, split
from tests.spawn import run_ranks

LIMIT_S = 77.0


def timeouts() -> dict[str, float]:
    """The timeouts that groups are made with, by the ranks they are of."""
    graph = build_transformer(
        Transformer(layers=4, hidden=8, heads=2, kv_heads=2, ffn_hidden=8, vocab=16, seq_len=4)
    )
    plan = default_plan(graph, pp=2, tp=2)
    made: dict[str, Any] = {}
    new_group = dist.new_group

    def watched(ranks: Any = None, timeout: Any = None, **options: Any) -> Any:
        made[str(ranks or "all")] = timeout
        return new_group(ranks, timeout, **options)

    dist.new_group = watched
    mesh = build_mesh(plan, torch.device("cpu"))
    mesh.open_host_group()
    mesh.open_group([(0, 2), (1, 3)], for_messages=True)
    mesh.close()
    dist.new_group = new_group
    return {ranks: timeout.total_seconds() for ranks, timeout in made.items()}


def test_the_run_s_timeout_reaches_every_group():
    for backend in ("gloo", "staged"):
        found = run_ranks(timeouts, 4, backend=backend, timeout_s=LIMIT_S)
        expected = dict.fromkeys(("[0, 1]", "[2, 3]", "[0, 2]", "[1, 3]", "all"), LIMIT_S)
        assert found == [expected] * 4


def pretend(monkeypatch: pytest.MonkeyPatch, *, splits: bool = True) -> list[Any]:
    """Be one of six ranks whose backend splits communicators, or not; return what is split."""
    calls: list[Any] = []
    group = SimpleNamespace(
        bound_device_id=torch.device("cuda", 0),
        _get_backend=lambda device: SimpleNamespace(supports_splitting=splits),
    )
    faked = SimpleNamespace(
        ProcessGroup=SimpleNamespace,
        group=SimpleNamespace(WORLD=group),
        get_world_size=lambda: 6,
        split_group=lambda **options: calls.append(options),
    )
    monkeypatch.setattr(splitting, "dist", faked)
    return calls


def test_lines_of_an_axis_are_split_in_one_call(monkeypatch):
    """One call for each line would be 142 for 8 x 8 x 8 ranks, in which all 512 take part."""
    calls = pretend(monkeypatch)
    assert can_split([(0, 1), (2, 3)])
    split([(0, 1), (2, 3)], timeout=timedelta(seconds=9), options=None)
    # Ranks outside are alone: torch names groups by how many a process has, equal on all.
    assert calls == [
        {
            "split_ranks": [[0, 1], [2, 3], [4], [5]],
            "timeout": timedelta(seconds=9),
            "pg_options": None,
        }
    ]


def test_groups_that_no_split_makes(monkeypatch):
    pretend(monkeypatch)
    assert not can_split([(0, 1), (1, 2)])  # a rank in two
    assert not can_split([(1, 0)])  # a split numbers ranks as they ascend
    pretend(monkeypatch, splits=False)
    assert not can_split([(0, 1)])
