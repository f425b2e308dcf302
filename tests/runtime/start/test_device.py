"""Which device a process drives, and what differs between CPU ranks and GPU ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.runtime.process.device import (
    backend,
    bound_to,
    choose_device,
    message_options,
    p2p_needs_own_groups,
    refuse_blocking_launches,
)
from planner.runtime.start.launch import check_listed, check_ranks
from planner.runtime.start.workers import rank_environment


def test_a_gpu_of_the_local_rank_unless_the_cpu_is_named(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
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
    with pytest.raises(PlanError, match="'tpu' is unknown; use cpu or cuda"):
        choose_device("tpu")


def test_a_list_of_gpus_has_one_for_each_local_rank(monkeypatch):
    """P25, G3."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("PLANNER_DEVICES", "0,2,3")
    taken = []
    for local_rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        taken.append(choose_device("cuda").index)
    assert taken == [0, 2, 3]
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(PlanError, match="has 4, of which 0,2,3 are listed"):
        choose_device("cuda")


def test_the_only_gpu_that_a_launcher_shows_a_rank_is_its_own(monkeypatch):
    """srun --gpus-per-task=1: local rank 3 sees one GPU, which has the number 0."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda", 0)
    monkeypatch.setenv("PLANNER_DEVICES", "0")
    with pytest.raises(PlanError, match="local rank 3 needs its own GPU"):
        choose_device()


def test_ranks_share_gpus_over_the_staged_backend_alone(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("PLANNER_BACKEND", "staged")
    assert choose_device() == torch.device("cuda", 1)
    assert check_ranks(4, "cuda") == "cuda"
    assert bound_to(gpu) is None
    monkeypatch.delenv("PLANNER_BACKEND")
    with pytest.raises(PlanError, match="the plan needs 4 GPUs on this node and 2 are here"):
        check_ranks(4, "cuda")
    assert bound_to(gpu) == gpu


def test_messages_take_few_blocks_of_a_gpu_unless_the_user_says_how_many(monkeypatch):
    class Options:
        def __init__(self):
            self.config, self._timeout = SimpleNamespace(max_ctas=None), None

    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    gpu, limit = torch.device("cuda", 0), timedelta(seconds=9)
    options = message_options(gpu, limit)
    assert (options.config.max_ctas, options._timeout) == (8, limit)
    assert message_options(torch.device("cpu"), limit) is None
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "4")
    assert message_options(gpu, limit) is None


def test_launches_that_block_are_refused_where_ranks_would_wait_for_ever(monkeypatch):
    refuse_blocking_launches(4, "cuda")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    refuse_blocking_launches(1, "cuda")
    refuse_blocking_launches(4, "cpu")
    with pytest.raises(PlanError, match="CUDA_LAUNCH_BLOCKING is set, and with pp=4 ranks would"):
        refuse_blocking_launches(4, "cuda")
    monkeypatch.setenv("PLANNER_BACKEND", "staged")
    refuse_blocking_launches(4, "cuda")


def test_ranks_on_gpus_get_variables_that_the_user_did_not_set(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert "PYTORCH_ALLOC_CONF" not in rank_environment(1, "cpu")
    found = rank_environment(1, "cuda")
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert found["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] == "false"
    assert found["TORCH_FR_BUFFER_SIZE"] == "2000"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "9")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    found = rank_environment(1, "cuda")
    assert not {"PYTORCH_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE"} & set(found)


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([0, 2], "must name 3 different GPUs"),
        ([0, 2, 2], "must name 3 different GPUs"),
        ([0, 2, 4], "there is no GPU 4; 4 are here"),
        ([0, 2, -1], "there is no GPU -1; 4 are here"),
    ],
)
def test_a_list_of_gpus_that_ranks_can_not_take(monkeypatch, listed, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(PlanError, match=says):
        check_listed(listed, 3, "cuda")
    check_listed([3, 0, 1], 3, "cuda")


def test_a_backend_that_this_pytorch_lacks_is_named(monkeypatch):
    """M2."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    assert backend(torch.device("cpu")) == "gloo"
    with pytest.raises(PlanError, match=r"ranks on cuda talk through nccl, .* built without"):
        backend(torch.device("cuda"))


@pytest.mark.parametrize(("name", "expected"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_nccl_runs_what_it_is_given_in_order_and_gloo_matches_tags(name, expected, monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    device = torch.device(name)
    assert backend(device) == expected
    assert p2p_needs_own_groups(device) is (expected == "nccl")
