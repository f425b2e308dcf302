"""A graph's key calls the user's class, in a process that has imported it."""

from __future__ import annotations

import pytest
import torch

from planner.errors import PlanError
from planner.language.graph.function_keys import function_key
from planner.runtime.stage.calls.autograd_functions import autograd_function


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x[:1] * factor, 3, x[1:] * factor

    @staticmethod
    def backward(ctx, first, _, second):
        return torch.cat([first, second]) * 7, None


def test_tensors_are_returned_and_the_users_backward_runs():
    x = torch.ones(2, requires_grad=True)
    first, second = autograd_function(function_key(Halves), x, 2.0)
    (first + second).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 7.0))


def test_a_function_that_nobody_imported_is_told():
    with pytest.raises(PlanError, match="Halves@00000000, which no imported module defines"):
        autograd_function("Halves@00000000", torch.ones(1))
