"""Functions that a model's own forward calls, and that no graph can hold, are ops as they are."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.capture.opaque.functions import find_function
from planner.errors import CaptureError
from planner.language.graph.module_keys import OPAQUE_MODULE


def ctc(logits: Tensor, labels: Tensor, *, blank: int, **_: object) -> Tensor:
    """As transformers has it: labels that are no padding, one after another."""
    kept = labels >= 0
    given = torch.full((len(labels),), logits.shape[1])
    chances = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(chances, labels.masked_select(kept), given, kept.sum(-1), blank=blank)


def picked(x: Tensor) -> Tensor:
    return x[x[:, 0, 0] > 0]


def around(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).masked_scatter(x[:, :1, :1] > 0, picked(x))


def decorated(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs)

    return run


@decorated
def signed(x: Tensor) -> Tensor:
    return 2 * x if x.sum() > 0 else x


def of_model(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(x) if x.sum() > 0 else x


LOSSES = {"ctc": ctc}


class Model(nn.Module):
    """Its forward calls functions, and has no part that does."""

    def __init__(self, function=None) -> None:
        super().__init__()
        self.head, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.head(x)
        if self.function is not None:
            return self.function(y).pow(2).mean()
        return LOSSES["ctc"](y, labels, blank=0, unused=None)


def batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 9, 4), "labels": torch.randint(-1, 4, (size, 3))}


def called(graph):
    ops = [op for program in graph.classes for op in program.ops if op.target == OPAQUE_MODULE]
    return [str(op.args[0]) for op in ops]


def test_a_loss_that_picks_labels_is_an_op():
    before = ctc.__code__
    (key,) = called(capture_module(Model(), batch(2), batch(3)))
    assert key.startswith("ctc@")
    assert ctc.__code__ is before, "a capture leaves the function as it was"
    function = find_function(key)
    assert function is not None
    assert function.function is ctc


def test_the_function_around_is_the_op_where_a_shape_depends_on_values():
    (key,) = called(capture_module(Model(around), batch(2), batch(3)))
    assert key.startswith("around@")


def test_a_function_under_a_decorator_is_found():
    (key,) = called(capture_module(Model(signed), batch(2), batch(3)))
    assert key.startswith("signed@")
    assert find_function(key) is not None


def test_what_is_given_a_module_is_refused_at_its_line():
    model = Model()
    model.function = functools.partial(of_model, model)
    with pytest.raises(CaptureError, match=r"return model\.head.*depends on a tensor's values"):
        capture_module(model, batch(2), batch(3))


def test_a_function_that_is_not_there_is_not_found():
    assert find_function("ctc@00000000") is None
