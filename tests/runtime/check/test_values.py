"""A NaN or infinity stops the step before weights change, named by the tensor it began in."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.language.lowering.defaults import default_plan
from planner.runtime.state.optimizers.passing_over import can_pass_over, passing_over
from planner.runtime.step.update.values import ValuesError
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


def stopped(
    where: str, settings: dict[str, Any], clips: bool, fused: bool = False
) -> tuple[str, bool]:
    """Train two good steps and a bad one; the message on this rank, and whether weights stayed."""
    torch.manual_seed(0)
    module = Overflows(where=where)
    graph = capture_module(Overflows(where=where), batch_of(2), batch_of(3))
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2, **settings)
    engine = planner.apply(
        plan,
        module,
        optimizer=lambda params: (
            torch.optim.AdamW(params, lr=1e-6, fused=True)
            if fused
            else torch.optim.SGD(params, lr=1e-6)
        ),
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
    before, state_before = engine.full_state_dict(), _state(engine.optimizer)
    with pytest.raises(ValuesError) as raised:
        engine.step(bad)
    after = engine.full_state_dict()
    same = all(torch.equal(before[name], after[name]) for name in before)
    assert engine.state.trained.can_pass_over(engine.optimizer) == fused
    state = _state(engine.optimizer)
    same = same and all(map(torch.equal, state_before, state))
    return str(raised.value), same and engine.steps == 2


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.clone() for each in optimizer.state.values() for t in each.values()]


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


@pytest.mark.parametrize("settings", [{"pp": 2}, {"dp": 2, "zero_stage": 3}], ids=["pp", "zero"])
def test_a_fused_optimizer_passes_the_step_over(settings):
    """Its update is given to the device before the host reads the flag, and changes nothing."""
    for message, stayed in run_ranks(stopped, 2, "forward", settings, True, True):
        assert "step 3: the loss is " in message
        assert "first in exp" in message
        assert stayed


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), True),
        (lambda p: torch.optim.Adam(p, fused=True, amsgrad=True), True),
        (torch.optim.AdamW, False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), False),
    ],
)
def test_optimizers_that_pass_a_step_over_leave_all_as_it_was(made, expected):
    param = nn.Parameter(torch.ones(3))
    optimizer = made([param])
    assert can_pass_over(optimizer) == expected
    if not expected:
        return
    for number, wrong in enumerate((1.0, 0.0, 1.0)):  # the first step, too
        before = [param.detach().clone(), *_state(optimizer)]
        param.grad = torch.full((3,), float("nan") if wrong else 1.0)
        with passing_over(optimizer, torch.tensor(wrong)):
            optimizer.step()
        after = [param.detach().clone(), *_state(optimizer)]
        if number == 0:
            assert all(not t.any() for t in after[1:])
            before, after = before[:1], after[:1]
        assert all(map(torch.equal, before, after)) == bool(wrong)
        assert not hasattr(optimizer, "found_inf")
