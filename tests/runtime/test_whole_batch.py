"""N1: ops across samples run on the whole batch by every replica: training equals one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanError
from planner.graph import ModelGraph
from planner.plan import Plan
from planner.plan.defaults import default_plan
from tests.captures import capture_module
from tests.runtime.whole_batch_models import MODELS, batch
from tests.spawn import run_ranks

RTOL = 1e-9


def captured(name: str) -> ModelGraph:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        return capture_module(MODELS[name](), batch(2), batch(3), name=name)
    finally:
        torch.set_default_dtype(torch.float32)


def gap_to_one_process(name: str, plan: Plan, sizes: tuple[int, ...]) -> float:
    """Train and evaluate on batches of these sizes; return the largest difference."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module: nn.Module = MODELS[name]()
    alone = copy.deepcopy(module)
    engine = planner.apply(
        plan, module, optimizer=torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    )
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-4)
    gaps = []
    for step, size in enumerate(sizes):
        inputs = batch(size, step)
        gaps.append(abs(engine.evaluate(inputs).item() / alone(*inputs).item() - 1))
        optimizer.zero_grad()
        expected = alone(*inputs)
        expected.backward()
        gaps.append(abs(engine.step(inputs).item() / expected.item() - 1))
        found = engine.full_gradients()
        gaps += [(found[n] - p.grad).abs().max().item() for n, p in _trained(alone) if found]
        optimizer.step()
    state = engine.full_state_dict()
    gaps += [(state[n] - p).abs().max().item() for n, p in _trained(alone) if state]
    engine.close()
    return max(gaps)


def _trained(module: nn.Module) -> Any:
    return ((name, p) for name, p in module.named_parameters() if p.grad is not None)


def gaps(cases: list[tuple[str, Plan, tuple[int, ...]]]) -> dict[str, float]:
    return {f"{name} {plan.degrees}": gap_to_one_process(name, plan, s) for name, plan, s in cases}


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"dp": 2}, {"dp": 2, "zero_stage": 3}, {"dp": 2, "recompute": "full"}],
    4: [{"dp": 4, "zero_stage": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "schedule": "naive"}],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(name, world_size):
    graph = captured(name)
    cases = []
    for layout in LAYOUTS[world_size]:
        plan = default_plan(graph, microbatch_size=8 // layout["dp"], num_microbatches=1, **layout)
        # (On tp, a batch of other sizes may not divide.)
        sizes = (8, 8) if "tp" in layout else (8, 7, 5)
        cases.append((name, plan, sizes))
    for found in run_ranks(gaps, world_size, cases):
        assert {case: gap for case, gap in found.items() if not gap < RTOL} == {}


def test_microbatches_are_refused():
    plan = default_plan(captured("Clip"), num_microbatches=2)
    with pytest.raises(PlanError, match=r"samples are compared with each other .*`accept` local-"):
        planner.apply(plan, MODELS["Clip"]().double())
