"""What meta kernels let pass and one process refuses is refused before a search, with its line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.errors import CaptureError
from tests.captures import capture_module

WIDTH = 8


def _zeros(h, *shape, dtype=torch.float32):
    return torch.zeros(h.shape[0], *shape, dtype=dtype)


REFUSED = {
    "targets of 32 bits": (
        lambda m, h: F.cross_entropy(m(h).flatten(0, 1), _zeros(h, 4, dtype=torch.int32).flatten()),
        "expected target dtype",
    ),
    "a double product": (lambda m, h: m(h.double()).sum(), "must have the same dtype"),
    "a kernel without integers": (
        lambda m, h: (m(h) * torch.softmax(_zeros(h, 4, WIDTH, dtype=torch.long), -1)).sum(),
        "not implemented for 'Long'",
    ),
    "an index in place": (
        lambda m, h: _zeros(h, WIDTH).index_put_((torch.arange(2),), m(h)[:2, 0].half()).sum(),
        "source and destination dtypes match",
    ),
    "a double convolution": (
        lambda m, h: F.conv1d(m(h), torch.ones(2, 4, 3, dtype=torch.float64)).sum(),
        "should be the same",
    ),
    "memory written to twice": (
        lambda m, h: m(h)[:, :1].expand(-1, 4, -1).mul_(2.0).sum(),
        "a single memory location",
    ),
    # Fake tensors have this view; the tensors of a plan have not.
    "a view of a slice": (lambda m, h: m(h)[:, :1].view(-1).sum(), r"use reshape\(\)"),
    "a view of a transpose": (lambda m, h: m(h).mT.view(-1).sum(), r"use reshape\(\)"),
    "a loss without gradient": (lambda m, h: m(h).detach().sum(), r"so backward\(\) fails"),
}

TAKEN = {
    "an index": lambda m, h: m(h)[:, torch.arange(2)].sum(),
    "a mask": lambda m, h: m(h).masked_fill(_zeros(h, 4, WIDTH).bool(), 1e4).sum(),
    "a promotion": lambda m, h: (m(h) * torch.arange(WIDTH) + m(h).double()).sum(),
    "indices of 32 bits": lambda m, h: torch.gather(
        m(h), 2, _zeros(h, 4, 2, dtype=torch.int)
    ).sum(),
    "half precision on its own": lambda m, h: (m(h).half() * 2).float().sum(),
    "a write that lies apart": lambda m, h: m(h).expand(-1, 4, -1).mul_(2.0).sum(),
    "a view of one sample's slice": lambda m, h: m(h)[:, 0].contiguous().view(-1).sum(),
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


def _in_one_process(loss):
    Model(loss)(torch.randn(2, 4, WIDTH)).backward()


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_line(name):
    loss, told = REFUSED[name]
    with pytest.raises(Exception):  # noqa: B017
        _in_one_process(loss)
    with pytest.raises(CaptureError, match=told) as refused:
        _capture(loss)
    assert "\n" not in str(refused.value)
    if "gradient" not in name:
        assert f"at {__file__}:" in str(refused.value)


@pytest.mark.parametrize("name", TAKEN)
def test_what_one_process_takes_is_taken(name):
    _in_one_process(TAKEN[name])
    assert _capture(TAKEN[name]).num_params() == WIDTH * (WIDTH + 1)


def test_under_autocast_dtypes_are_not_what_is_wrong():
    """What autocast converts on a device, it leaves alone on meta."""

    def loss(layer, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (layer(h.bfloat16()) @ torch.ones(WIDTH, WIDTH)).float().sum()

    _in_one_process(loss)
    with pytest.raises(CaptureError, match="leave autocast out"):
        _capture(loss)


def test_a_kernel_that_a_cpu_alone_lacks_is_no_fault_of_the_model() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            # As models do that count by float on CPUs.
            counted = ids.float() if ids.device.type == "cpu" else ids.int()
            counts = torch.histc(counted, bins=4, min=0, max=3)
            return (self.weight * counts).sum() / ids.shape[0]

    capture_module(Counts(), {"ids": torch.arange(4)}, {"ids": torch.arange(6)})
