"""Writes into complex tensors: the values and gradients of the write that one process makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planner.runtime.stage.calls.complex_writes import COMPLEX_WRITES


def complex_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128, requires_grad=True)


@pytest.mark.parametrize("dim", [1, -1])
def test_a_slice(dim):
    x, part = complex_tensor(3, 6), complex_tensor(3, 2)
    pure = COMPLEX_WRITES["aten.slice_scatter.default"]
    check(pure, x, part, (dim, 1, 5, 2), (slice(None), slice(1, 5, 2)))


@pytest.mark.parametrize("dim", [0, -2])
def test_one_of_a_dim(dim):
    x, part = complex_tensor(3, 4), complex_tensor(4)
    check(COMPLEX_WRITES["aten.select_scatter.default"], x, part, (dim, 1), (1,))


def check(pure, x, part, where, index):
    weights = torch.randn_like(x)
    made = pure(x.conj(), part.conj(), *where)
    found = torch.autograd.grad((made * weights).sum().real, (x, part))
    expected = x.conj().clone()
    expected[index] = part.conj()
    assert torch.equal(made, expected)
    for ours, autograds in zip(
        found, torch.autograd.grad((expected * weights).sum().real, (x, part)), strict=True
    ):
        assert torch.equal(ours, autograds)
