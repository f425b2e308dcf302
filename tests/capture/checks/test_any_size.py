"""N1: what Python computes of the number of samples holds for every number, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.capture.module import capture_module
from planner.errors import CaptureError

Reduce = Callable[[Tensor], Tensor]


class Reduced(nn.Module):
    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self.layer, self._reduce = nn.Linear(4, 4), reduce

    def forward(self, x: Tensor) -> Tensor:
        return self._reduce(self.layer(x).square().mean(1))


def batch(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 4),)


@pytest.mark.parametrize(
    ("reduce", "called"),
    [
        (lambda e: e.sum() / max(len(e), 4), "torch.Tensor.div"),
        (lambda e: e[: min(len(e), 4)].mean(), "torch.Tensor.__getitem__"),
        (lambda e: e[-3:].mean(), "torch.Tensor.__getitem__"),
        (lambda e: 2 * e.mean() if len(e) > 4 else e.mean(), "torch.Tensor.mul"),
        (lambda e: e.sum() / (len(e) // 4 + 1), "torch.Tensor.div"),
        (lambda e: e.sum() * (0.5 if len(e) > 8 else 1.0), "torch.Tensor.mul"),
        (lambda e: e.mean().abs() if len(e) > 8 else e.mean(), "torch.Tensor.abs"),
    ],
)
def test_what_holds_for_small_batches_alone_is_refused(reduce, called):
    with pytest.raises(CaptureError) as caught:
        capture_module(Reduced(reduce), batch(2), batch(3))
    message = str(caught.value)
    assert message.startswith("on a batch of 1009 samples the forward does otherwise than on 2, in")
    assert f"in {called} at {__file__}:" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "reduce",
    [
        lambda e: e.sum() / len(e),
        lambda e: e.sum() / (len(e) - 1),
        lambda e: e.view(len(e), 1).expand(len(e), 3).mean(),
        lambda e: e.view(1, -1)[:, : 2 * len(e)].mean(),
    ],
)
def test_sizes_on_a_line_are_captured(reduce):
    assert capture_module(Reduced(reduce), batch(2), batch(3)).loss
