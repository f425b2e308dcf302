"""Copies to the device: on a CPU there is nothing to copy but a change of dtype.

What a GPU gets, and that the host does not wait for it, is in `tests.runtime.test_fake_cuda`.
"""

from __future__ import annotations

import torch

from planner.runtime.state.to_device import to_device

_CPU = torch.device("cpu")


def test_on_a_cpu_a_tensor_is_what_it_was():
    tensor = torch.arange(6).view(2, 3).t()
    assert to_device(tensor, _CPU) is tensor
    assert torch.equal(to_device(tensor, _CPU, torch.float64), tensor.double())
