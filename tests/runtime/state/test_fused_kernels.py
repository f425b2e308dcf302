"""D16: Kernels of the optimizer on accelerators: fused where the user chose none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.runtime.state.optimizers.optimizer import use_fused_kernels
from planner.runtime.state.optimizers.several import Several

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_steps_by_fused_kernels_on_an_accelerator(kind):
    """The same update, but for rounding; foreach would copy all parameters at the peak."""
    found = []
    for device in (CPU, CUDA):
        own = params()
        optimizer = kind(own, lr=0.1, weight_decay=0.1)
        use_fused_kernels(optimizer, device)
        assert [g["fused"] for g in optimizer.param_groups] == [True if device == CUDA else None]
        for _ in range(3):
            optimizer.step()
        found.append(own)
    for loop, fused in zip(*found, strict=True):
        torch.testing.assert_close(loop, fused, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "chosen", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}]
)
def test_what_the_user_chose_stays(chosen: dict[str, Any]):
    optimizer = torch.optim.AdamW(params(), **chosen)
    use_fused_kernels(optimizer, CUDA)
    assert not optimizer.param_groups[0]["fused"]


def test_others_step_as_they_do():
    first, second = params()
    complex_numbers = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    several = Several([torch.optim.AdamW([first]), torch.optim.SGD([second], lr=0.1)])
    use_fused_kernels(several, CUDA)
    assert [part.param_groups[0]["fused"] for part in several.parts] == [True, None]
    own = torch.optim.AdamW([complex_numbers])
    use_fused_kernels(own, CUDA)
    assert own.param_groups[0]["fused"] is None
