"""Complex parameters, activations and writes into them, trained as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import LayoutError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.plan.replication import why_no_zero
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, train_beside
from tests.spawn import run_ranks

WAYS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "num_microbatches": 2},
    "dp2-full": {"dp": 2, "num_microbatches": 2, "recompute": "full"},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "tp2": {"tp": 2, "num_microbatches": 4},
}


class Modes(nn.Module):
    """Multiplies some modes, writes them into zeros by a slice and by an entry, adds into one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128) * 0.3)
        self.b = nn.Parameter(torch.randn(3, dtype=torch.complex128) * 0.1)

    def forward(self, z):
        out = torch.zeros(len(z), 5, 3, dtype=z.dtype)
        out[:, :4] = z[:, :4] @ self.w + self.b
        out[:, 4] = z[:, 4] * 2
        out[..., 0] += z[..., 0].conj()
        return out


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Modes() for _ in range(4))

    def forward(self, x):
        z = torch.complex(x, x.sin())
        for layer in self.layers:
            z = layer(z)
        return z.abs().square().mean()


def batch(size: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, 5, 3, generator=generator, dtype=torch.float64),)


def plans() -> list[Plan]:
    graph = capture_module(Waves(), batch(2), batch(3), name="waves")
    made = [default_plan(graph, microbatch_size=2, **way) for way in WAYS.values()]
    return [*made, made[0].model_copy(update={"optimizer_on_host": True})]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), eps=1e-3)


def train(plan: Plan) -> float:
    """How far training is from one process."""
    torch.manual_seed(0)
    module = Waves()
    alone = OneProcess(
        module, adam, clip=lambda alone: nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    )
    engine = planner.apply(plan, module, optimizer=adam(module), max_grad_norm=0.1)
    return train_beside(engine, alone, [batch(plan.global_batch)] * 2).largest


def train_each(every: list[Plan]) -> tuple[list[float], str]:
    gaps = [train(plan) for plan in every]
    sharded = every[0].model_copy(update={"zero_stage": 1})
    with pytest.raises(LayoutError) as caught:
        planner.apply(sharded, Waves())
    return gaps, str(caught.value)


def test_complex_models_train_as_one_process_and_zero_is_refused():
    """Under ZeRO they trained otherwise, in silence: FSDP2 reduces complex gradients wrongly."""
    gaps, refused = run_ranks(train_each, 2, plans())[0]
    assert max(gaps) < 1e-12, gaps
    assert refused.startswith("ZeRO shards no complex parameters (")
    assert refused.endswith("torch.complex128); search with `zero` 0")


def test_a_search_is_told_which_block_zero_does_not_take():
    graph = capture_module(Waves(), batch(2), batch(3), name="waves")
    told = why_no_zero(graph, "model")
    assert told.startswith("ZeRO shards no complex parameters, and block")
    assert told.endswith("trains layers.0.w")
