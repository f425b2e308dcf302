"""Buffers that the preamble reads have the values that were loaded, wherever else they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.captures import capture_module
from tests.spawn import run_ranks

WIDTH, LENGTH = 4, 3


class Rotated(nn.Module):
    """Adds what positions and a buffer make; `block_reads` the buffer, too, in its first block."""

    def __init__(self, rate: float, *, persistent: bool = True, block_reads: bool = False):
        super().__init__()
        self.register_buffer("rate", torch.full((WIDTH,), rate), persistent=persistent)
        self.block_reads = block_reads
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, target):
        positions = torch.cos(torch.arange(x.shape[1])[:, None] * self.rate)
        scaled = x * self.rate if self.block_reads else x
        x = torch.tanh(self.first(scaled)) + positions
        return F.mse_loss(self.second(x) + positions, target)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(size)
    return torch.randn(size, LENGTH, WIDTH), torch.randn(size, LENGTH, WIDTH)


def graph_of(module: nn.Module):
    graph = capture_module(module, batch(2), batch(3))
    assert [graph.tensor[name].fqn for name in graph.preamble.params] == ["rate"]
    return graph


def test_a_buffer_without_values_is_refused(tmp_path):
    """Not in the state dict, so not in the files: a rotary model's on the meta device."""
    kept = Rotated(2.0, persistent=False)
    torch.save(kept.state_dict(), tmp_path / "weights.pt")
    plan = default_plan(graph_of(kept))
    with torch.device("meta"):
        module = Rotated(2.0, persistent=False)
    with pytest.raises(PlanError, match=r"has no rate, a buffer that the model has on the meta"):
        planner.apply(plan, module, weights=tmp_path / "weights.pt")
    given = batch(plan.global_batch)
    expected = kept(*given).detach()
    module.rate = kept.rate  # whose values the engine has afterwards
    engine = planner.apply(plan, module, weights=tmp_path / "weights.pt")
    torch.testing.assert_close(engine.forward(given), expected)


def losses_after_loading(plan: Plan, folder: Path) -> list[float]:
    """Of models that began with another rate: by weights, without values, by a checkpoint."""
    losses = []
    with torch.device("meta"):
        empty = Rotated(1.0, block_reads=True)
    for module in (Rotated(1.0, block_reads=True), empty):
        engine = planner.apply(plan, module, weights=folder / "weights.pt")
        losses.append(engine.forward(batch(plan.global_batch)).item())
    engine.save(folder / "run")
    engine.close()
    engine = planner.apply(plan, Rotated(1.0, block_reads=True))
    engine.load(folder / "run")
    return [*losses, engine.forward(batch(plan.global_batch)).item()]


def test_a_buffer_that_a_block_reads_too_is_loaded_for_both(tmp_path):
    """On two stages: the preamble runs on each, and the block that has the buffer on the first."""
    kept = Rotated(2.0, block_reads=True)
    torch.save(kept.state_dict(), tmp_path / "weights.pt")
    plan = default_plan(graph_of(kept), pp=2)
    expected = [kept(*batch(plan.global_batch)).item()] * 3
    for losses in run_ranks(losses_after_loading, 2, plan, tmp_path):
        torch.testing.assert_close(losses, expected)
