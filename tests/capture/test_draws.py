"""Random draws whose ATen op has no derivative, where the call in Python needs none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.capture import capture_module
from tests.executed import executed


class Drawing(nn.Module):
    """Multiplies what has a gradient by numbers drawn over it."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return (hidden * self.draw(hidden)).mean()


@pytest.mark.parametrize(
    "draw",
    [
        lambda hidden: torch.randint_like(hidden, 1, 3),
        lambda hidden: (hidden + 1).bernoulli_(),
        lambda hidden: (hidden + 1).normal_(),
        lambda hidden: torch.empty_like(hidden).bernoulli_(0.5),
    ],
    ids=["randint_like", "bernoulli_", "normal_", "empty_like.bernoulli_"],
)
def test_the_backward_is_that_of_one_process(draw):
    model = Drawing(draw)
    batches = ({"x": torch.randn(n, 4)} for n in (2, 3))
    (program,) = (each.bind(2) for each in capture_module(model, *batches).classes)
    x = torch.randn(2, 4)
    given = dict(zip(program.params, model.parameters(), strict=True)) | {program.inputs[0]: x}
    torch.manual_seed(0)
    loss = executed(program.ops, given)[program.outputs[0]]
    found = torch.autograd.grad(loss, tuple(model.parameters()))
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x), tuple(model.parameters()))
    torch.testing.assert_close(found, expected)
