"""A NaN or infinity stops the step before weights change, named by the tensor it began in."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.plan.defaults import default_plan
from planner.runtime.check.values import ValuesError
from tests.captures import capture_module
from tests.spawn import run_ranks


class Overflows(nn.Module):
    """Layers of which the second overflows in the forward, or in the gradient, at a large input."""

    def __init__(self, *, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.where = where

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        scores = torch.zeros(4, 4).masked_fill(~mask, float("-inf"))  # no fault
        for number, layer in enumerate(self.layers):
            x = layer(x) @ scores.softmax(-1)
            if number == 1 and self.where == "forward":
                x = x + torch.exp(x.abs())
            if number == 1 and self.where == "backward":
                x = torch.sqrt((x * gate).square()) + x
        return x.square().mean()


def batch_of(size: int) -> dict[str, Any]:
    return {"x": torch.linspace(-1, 1, size * 4).reshape(size, 4), "gate": torch.ones(size, 1)}


def stopped(where: str, settings: dict[str, Any], clips: bool) -> tuple[list[str], bool]:
    """Train two good steps and a bad one; the message on this rank, and whether weights stayed."""
    torch.manual_seed(0)
    module = Overflows(where=where)
    graph = capture_module(Overflows(where=where), batch_of(2), batch_of(3))
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2, **settings)
    engine = planner.apply(
        plan,
        module,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        max_grad_norm=1.0 if clips else None,
    )
    good = batch_of(plan.global_batch)
    engine.step(good)
    engine.step(good)
    bad = {name: tensor.clone() for name, tensor in good.items()}
    half = len(bad["x"]) // 2
    if where == "forward":
        bad["x"][half:] = 1e4
    else:
        bad["gate"][half:] = 0.0
    before = engine.full_state_dict()
    with pytest.raises(ValuesError) as raised:
        engine.step(bad)
    after = engine.full_state_dict()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return str(raised.value), same and engine.steps == 2


@pytest.mark.parametrize("settings", [{"pp": 2}, {"dp": 2, "zero_stage": 1}], ids=["pp", "zero"])
def test_the_forward_overflows(settings):
    """Microbatch 1 has the large inputs, and the exponential of the second layer is infinite."""
    for message, stayed in run_ranks(stopped, 2, "forward", settings, False):
        assert re.search(
            r"step 3: the loss is (inf|nan); first in exp\S*, in the forward of stage 0, "
            r"microbatch 1: \d+ infinite of 8 entries, shape \[2, 4\]; \S*test_values.py:\d+: "
            r"`x = x \+ torch.exp\(x.abs\(\)\)`",
            message,
        ), message
        assert stayed


def test_a_gradient_overflows_where_the_loss_is_finite():
    """The gradient of the root at zero is infinite; times that of the square there, NaN."""
    for clips in (False, True):  # (one rank: in this process's own fork)
        ((message, stayed),) = run_ranks(stopped, 1, "backward", {}, clips)
        assert re.search(
            r"step 3: a gradient is NaN or infinite; first in the gradient of sqrt\S*, in the "
            r"backward of stage 0, microbatch 1: .*; \S*test_values.py:\d+: `x = torch.sqrt",
            message,
        ), message
        assert stayed
