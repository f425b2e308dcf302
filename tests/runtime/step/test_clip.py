"""Clipping on one rank is `torch.nn.utils.clip_grad_norm_`, whatever dtypes the model has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.runtime.state.gradients.clip import Clipping


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return SimpleNamespace(device=torch.device("cpu"))


def params_with_gradients() -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.zeros(3, dtype=dtype))
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    ]
    for param in params:
        param.grad = torch.randn_like(param)
    return [*params, nn.Parameter(torch.zeros(2))]  # no gradient reaches the last


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_all_gradients_are_scaled_by_their_joint_norm(mesh, max_norm):
    ours, theirs = params_with_gradients(), params_with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    norm = Clipping([(param, 1.0) for param in ours], mesh).clip(max_norm)
    torch.testing.assert_close(norm, expected.double(), rtol=1e-6, atol=0)
    for param, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    assert ours[-1].grad is None


def test_shares_follow_which_parameters_have_gradients(mesh):
    """They are kept from step to step; an expert that no sample chose has no gradient."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    clipping = Clipping(zip(params, (1.0, 0.0, 0.5), strict=True), mesh)
    for grads, expected in [((3, 9, 4), 17), ((3, 9, None), 9), ((3, 9, 4), 17), ((None,) * 3, 0)]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else torch.tensor([float(grad)])
        assert clipping.clip(1e9).square().item() == pytest.approx(expected)


def test_an_element_that_several_ranks_hold_counts_by_its_share(mesh):
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([6.0, 8.0])
    norm = Clipping([(param, 0.25)], mesh).clip(2.5)  # four replicas, of which this is one
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(param.grad, torch.tensor([3.0, 4.0]))
