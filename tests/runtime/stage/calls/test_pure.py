"""Operators in a form that writes into nothing that autograd saves."""

from __future__ import annotations

import torch

from planner.runtime.stage.calls.pure import PURE


def test_rrelu_is_atens_and_saves_its_slopes_once_they_are_drawn():
    pure, x = PURE["aten.rrelu.default"], torch.linspace(-2, 2, 64, dtype=torch.float64)
    found = []
    for function in (pure, torch.ops.aten.rrelu.default):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        made = function(given, 0.1, 0.4, True)
        made.sum().backward()
        found.append((made.detach(), given.grad))
    for ours, atens in zip(*found, strict=True):
        assert torch.equal(ours, atens)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.clone()), lambda _: x):
        made = pure(x.clone().requires_grad_(), 0.1, 0.4, True)
    assert any(torch.equal(x * slopes, made.detach()) for slopes in saved)


def test_without_training_it_has_one_slope():
    made = PURE["aten.rrelu.default"](torch.tensor([-1.0, 1.0]), 0.1, 0.3, False)
    assert made.tolist() == torch.tensor([-0.2, 1.0]).tolist()
