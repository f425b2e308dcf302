"""Autograd functions become ops of their own; what an op could not be given again is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from planner.capture import capture_module
from planner.capture.checks.functions import FunctionCalls, is_seen_through
from planner.errors import CaptureError

OUTSIDE = torch.ones(2)


class Twice(torch.autograd.Function):
    """Says of its results: a tensor, a number, and a tensor without gradient."""

    @staticmethod
    def forward(ctx, x, factor=2.0):
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x)
        return x * factor, 7, order

    @staticmethod
    def backward(ctx, grad, *_):
        return grad, None


def under_fakes(run):
    with torch._subclasses.FakeTensorMode() as mode, FunctionCalls().recorded() as _:
        return run(mode.from_tensor(torch.ones(2)))


def test_a_call_becomes_one_op_that_says_what_the_function_says():
    calls = FunctionCalls()
    with torch._subclasses.FakeTensorMode() as mode, calls.recorded():
        y, number, order = Twice.apply(mode.from_tensor(torch.ones(2, 3)))
    (call,) = calls.calls
    assert (y.shape, number, order.dtype) == ((2, 3), 7, torch.int64)
    assert call.args[1:] == ()
    assert call.returns_tuple
    assert call.not_differentiable == {1}  # of the tensors it returns
    assert call.key.startswith("Twice@")
    assert "test_functions.py" in call.described
    y, _, _ = Twice.apply(torch.ones(2, requires_grad=True))  # outside, as ever
    assert y.requires_grad


def function(body) -> type:
    return type("Given", (torch.autograd.Function,), {"forward": staticmethod(body)})


@pytest.mark.parametrize(
    ("body", "args", "says"),
    [
        (lambda ctx, x: x + OUTSIDE, (), "reads a tensor of shape"),
        (lambda ctx, x: x + torch.rand(2), (), "draws random numbers"),
        (lambda ctx, x, other: x, ([OUTSIDE],), "tensors inside a container"),
        (lambda ctx, x, other: x, (object(),), "is given a object"),
        (lambda ctx, x: 3, (), "returns no tensor"),
        (lambda ctx, x: ctx.mark_dirty(x), (), "writes into its input"),
    ],
)
def test_what_a_plan_cannot_hold_is_refused(body, args, says):
    with pytest.raises(CaptureError, match=says):
        under_fakes(lambda x: function(body).apply(x, *args))


def test_what_a_forward_closes_over_cannot_be_found_again():
    factor = 3.0

    with pytest.raises(CaptureError, match="reads factor of the function around it"):
        under_fakes(lambda x: function(lambda ctx, y: y * factor).apply(x))


def test_checkpointing_is_seen_through():
    assert is_seen_through(torch.utils.checkpoint.CheckpointFunction)
    assert not is_seen_through(Twice)
    calls = FunctionCalls()
    with calls.recorded():
        y = checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert type(y.grad_fn).__name__ == "SinBackward0"  # its content, not a function around it
    assert calls.calls == []


class ByTable(torch.autograd.Function):
    """Reads a number from a table."""

    @staticmethod
    def forward(ctx, x, table):
        return x * table["scale"]

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


def test_a_function_that_is_given_a_table_is_refused_at_its_line():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return ByTable.apply(self.layer(x), {"scale": 2.0}).mean()

    with pytest.raises(CaptureError, match=r"ByTable at .*test_functions.py.*is given a dict"):
        capture_module(Net(), torch.ones(2, 4), torch.ones(3, 4))
