"""Of fifty random models of odd constructs each trains as one process does, or is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import planner
from planner.capture import capture_module
from planner.errors import CaptureError
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from tests.capture.opaque.random_modules import random_module
from tests.constructs import batch


@pytest.fixture(autouse=True)
def _fp64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def refusal(module: nn.Module) -> str | ModelGraph:
    """Return a model's graph, or why it has none."""
    try:
        return capture_module(module, batch(2), batch(3))
    except CaptureError as error:
        return str(error)


def trained_alone(module: nn.Module) -> list[Tensor] | None:
    """The losses of two steps; None where one process fails, too."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        try:
            loss = module(*batch(6))
            loss.backward()
        except RuntimeError:
            return None
        optimizer.step()
        losses.append(loss.detach())
    return losses


def outcome(seed: int) -> str:
    """Train a model twice, or return why not."""
    (alone, names), (module, _) = random_module(seed), random_module(seed)
    graph = refusal(module)
    if isinstance(graph, str):
        assert "\n" not in graph, (seed, names)
        assert "_modules.py:" in graph, (seed, names, graph)
        return "refused"
    losses = trained_alone(alone)
    if losses is None:
        return "fails alone"
    plan = default_plan(graph, num_microbatches=1, microbatch_size=6)
    engine = planner.apply(plan, module, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    for step, expected in enumerate(losses):
        torch.manual_seed(step)
        found = engine.step(batch(6))
        if "_dropped" in names:  # by draws of its own
            assert found.isfinite(), (seed, names)
            continue
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=f"{seed} {names}")
    if "_dropped" in names:
        return "draws"
    state = engine.full_state_dict()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(
            state[name], param.detach(), rtol=1e-8, atol=1e-10, msg=f"{seed} {names} {name}"
        )
    return "trains"


def test_some_train_and_some_are_refused():
    assert {"trains", "refused"} <= Counter(map(outcome, range(8))).keys()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_of_fifty_trains_or_is_refused():
    found = Counter(map(outcome, range(100, 150)))
    assert min(found["trains"], found["refused"]) >= 10, found
