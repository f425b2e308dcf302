"""A forward that converts a part to the dtype that it has already changes nothing."""

import pytest
import torch
from torch import nn

from planner.capture import capture_module
from planner.capture.checks.conversions import same_parts
from planner.errors import CaptureError


class Converts(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.router, self.body, self.dtype = nn.Linear(4, 4), nn.Linear(4, 4), dtype

    def forward(self, x):
        y = self.body(x)
        self.router = self.router.to(self.dtype)
        return (self.router(y.to(self.dtype)).softmax(-1).to(x.dtype) * y).pow(2).mean()


def test_a_part_keeps_its_parameters():
    graph = capture_module(Converts(), torch.randn(2, 4), torch.randn(3, 4))
    held = {tensor.fqn for tensor in graph.tensors if tensor.kind == "param"}
    assert held == {"router.weight", "router.bias", "body.weight", "body.bias"}


def test_modules_convert_as_before_afterwards():
    before = nn.Module.to
    capture_module(Converts(), torch.randn(2, 4), torch.randn(3, 4))
    assert nn.Module.to is before


def test_a_part_that_another_dtype_is_given_is_refused():
    with pytest.raises(CaptureError):
        capture_module(Converts(torch.float64), torch.randn(2, 4), torch.randn(3, 4))


def test_inside_a_module_is_returned_as_it_is_where_no_dtype_changes():
    part = nn.BatchNorm1d(3)  # whose counter is of integers, which no dtype converts
    weight = part.weight
    with same_parts():
        assert part.to(torch.float32) is part
        assert part.to("cpu").weight is weight
        part.to(torch.float64)
    assert part.weight.dtype == torch.float64
