"""Backwards that one process refuses are refused before a search, with the line that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.errors import CaptureError
from tests.captures import capture_module

WIDTH = 8


def doubling(returned):
    """A function that is twice its input, and whose backward returns this of its gradient."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return returned(grad)

    return Doubled


Right = doubling(lambda grad: grad * 2)
Cut = doubling(lambda grad: grad[:, :1])
Two = doubling(lambda grad: (grad, grad * 2))
Misspelled = doubling(lambda grad: grad * FACTOR)  # noqa: F821
OfValues = doubling(lambda grad: grad * 2 if grad.sum().item() > 0 else grad)


class ForwardOnly(torch.autograd.Function):
    """No backward at all."""

    @staticmethod
    def forward(ctx, x):
        return x * 2


def _exp_then_add(layer, x):
    y = layer(x).exp()
    y.add_(1.0)  # exp's backward reads its result
    return y.sum()


REFUSED = {
    "changed in place": (_exp_then_add, "modified by an inplace operation", "layer(x).exp()"),
    "another shape": (lambda m, x: Cut.apply(m(x)).sum(), "invalid gradient", "Cut.apply"),
    "a gradient too many": (lambda m, x: Two.apply(m(x)).sum(), "gradients", "Two.apply"),
    "a name": (lambda m, x: Misspelled.apply(m(x)).sum(), "FACTOR", "grad * FACTOR"),
    "no backward": (lambda m, x: ForwardOnly.apply(m(x)).sum(), "must implement", "ForwardOnly."),
}

TAKEN = {
    "a right backward": lambda m, x: Right.apply(m(x)).sum(),
    "a backward that needs values": lambda m, x: OfValues.apply(m(x)).sum(),
    "a write after its last use": lambda m, x: m(x).relu_().sum(),
    "a write into what nothing saved": lambda m, x: (m(x) + 1).add_(1.0).sum(),
}


class Model(nn.Module):
    """A layer, and a loss of it."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x):
        return self.loss(self.layer, x)


def _capture(loss):
    return capture_module(Model(loss), *((torch.randn(size, 4, WIDTH),) for size in (2, 3)))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_line(name):
    loss, told, code = REFUSED[name]
    with pytest.raises(Exception):  # noqa: B017
        Model(loss)(torch.randn(2, 4, WIDTH)).backward()
    with pytest.raises(CaptureError, match=told) as refused:
        _capture(loss)
    message = str(refused.value)
    assert "\n" not in message
    assert f"at {__file__}:" in message
    assert code in message


@pytest.mark.parametrize("name", TAKEN)
def test_what_one_process_takes_is_taken(name):
    Model(TAKEN[name])(torch.randn(2, 4, WIDTH)).backward()
    assert _capture(TAKEN[name]).num_params() == WIDTH * (WIDTH + 1)
