"""Which device a process drives, and what differs between CPU ranks and GPU ranks."""

from __future__ import annotations

import pytest
import torch

from planner.errors import PlanError
from planner.runtime.start.device import backend, choose_device, p2p_needs_own_groups


def test_a_gpu_of_the_local_rank_unless_the_cpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("PLANNER_DEVICE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device() == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("PLANNER_DEVICE", "cpu")
    assert choose_device() == torch.device("cpu")
    assert choose_device("cuda") == torch.device("cuda", 1)  # what is named comes first
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(PlanError, match="local rank 2 needs its own GPU; this machine has 2"):
        choose_device("cuda")
    with pytest.raises(PlanError, match="'tpu' is unknown"):
        choose_device("tpu")


@pytest.mark.parametrize(("name", "expected"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_nccl_runs_what_it_is_given_in_order_and_gloo_matches_tags(name, expected):
    device = torch.device(name)
    assert backend(device) == expected
    assert p2p_needs_own_groups(device) is (expected == "nccl")
