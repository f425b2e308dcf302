"""M6: parts of a batch are averaged, or summed where the loss is a sum over samples (fp64)."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, train_beside
from tests.spawn import run_ranks

RTOL = 1e-10
WIDTH = 8


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Meant(Summed):
    def forward(self, x):
        return super().forward(x) / len(x)


def plan_of(module: nn.Module) -> Plan:
    graph = capture_module(module.double(), batch(2), batch(3))
    return default_plan(graph, num_microbatches=2, microbatch_size=2)


def batch(size):
    return (torch.randn(size, WIDTH, dtype=torch.float64),)


def slow(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def gap_to_one_process(plan: Plan, sizes: tuple[int, ...]) -> float:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Summed()
    alone = OneProcess(module, slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # summing is what one device does
        engine = planner.apply(plan, module, optimizer=slow(module), loss_weight="sum")
    return train_beside(engine, alone, [batch(size) for size in sizes]).largest


@pytest.fixture(scope="module")
def graph():
    torch.set_default_dtype(torch.float64)
    try:
        return capture_module(Summed(), batch(2), batch(3), name="summed")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "layout", [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 2, "zero_stage": 2}], ids=str
)
def test_a_summed_loss_trains_as_in_one_process(graph, layout):
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2, **layout)
    sizes = (plan.global_batch,) if "tp" in layout else (plan.global_batch, plan.global_batch - 1)
    assert max(run_ranks(gap_to_one_process, 2, plan, sizes)) < RTOL


def test_a_loss_that_is_no_sum_is_not_added_up(graph):
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2)
    inputs = batch(4)
    module = Summed().double()
    found = [
        planner.apply(plan, copy.deepcopy(module), loss_weight=weight).step(inputs).item()
        for weight in (None, "sum")
    ]
    assert found == pytest.approx([module(*inputs).item()] * 2, rel=RTOL)
    mean = Meant().double()
    with pytest.raises(PlanError, match='loss_weight="sum" was given, and the loss is a mean over'):
        planner.apply(plan_of(mean), mean, loss_weight="sum")


def test_batches_of_sums_are_added_until_the_update(graph):
    """Gradients of two batches for one update: of the sum over all samples."""
    plan = default_plan(graph, num_microbatches=2, microbatch_size=2)
    first, two = batch(4), batch(3)
    found = []
    for batches in ([(torch.cat([first[0], two[0]]),)], [first, two]):
        module = Summed().double()
        module.load_state_dict({n: torch.ones_like(t) / 9 for n, t in module.state_dict().items()})
        sgd = torch.optim.SGD(module.parameters(), lr=0.01)
        if len(batches) == 1:
            module(*batches[0]).backward()
            sgd.step()
            found.append(module.layers[0].weight.detach())
            continue
        engine = planner.apply(plan, module, optimizer=sgd, loss_weight="sum")
        engine.step(first, update=False)
        engine.step(two)
        found.append(engine.full_state_dict()["layers.0.weight"])
        engine.close()
    torch.testing.assert_close(found[0], found[1], rtol=RTOL, atol=0)
