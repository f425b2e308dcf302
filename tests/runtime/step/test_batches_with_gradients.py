"""A step gives gradients to the model's own parameters: a batch that would have one is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.runtime.step.engine import Engine
from tests.captures import capture_module

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


def batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, WIDTH), "y": torch.randn(size, 1)}


@pytest.fixture
def engine_and_net() -> tuple[Engine, nn.Module]:
    torch.manual_seed(0)
    net = Net()
    alone = copy.deepcopy(net)
    plan = default_plan(capture_module(net, batch(2), batch(3)), num_microbatches=2)
    return planner.apply(plan, net), alone


@pytest.mark.parametrize("path", ["x", "y"])
@pytest.mark.parametrize("wrap", [dict, planner.OwnPart])
def test_a_batch_made_of_what_trains_is_refused(engine_and_net, path, wrap):
    engine, _ = engine_and_net
    given: Any = batch(2)
    given[path] = given[path].requires_grad_() * 2
    with pytest.raises(PlannerError, match=f"leaf '{path}' is computed from tensors that require"):
        engine.step(wrap(given))
    engine.step(wrap({name: tensor.detach() for name, tensor in given.items()}))
    engine.close()


def test_a_batch_that_requires_gradients_itself_is_given_none(engine_and_net):
    engine, alone = engine_and_net
    given = batch(2)
    given["x"].requires_grad_()
    expected = alone(**given)
    assert engine.step(given).item() == pytest.approx(expected.item(), rel=1e-6)
    assert given["x"].grad is None
    engine.close()


def test_what_is_evaluated_may_be_made_of_anything(engine_and_net):
    engine, alone = engine_and_net
    given = batch(2)
    given["x"] = given["x"].requires_grad_() * 2
    assert engine.evaluate(given).item() == pytest.approx(alone(**given).item(), rel=1e-6)
    engine.close()


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(engine_and_net, without):
    engine, _ = engine_and_net
    with without(), pytest.raises(PlannerError, match=r"under torch.no_grad\(\) or inference"):
        engine.step(batch(2))
    engine.step(batch(2))
    engine.close()
