"""N14, M2: ranks start a group when all have said that they can and are alike, or none does."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.templates import Transformer, build_transformer
from planner.runtime.process.groups.process_group import (
    _shared_backend,
    start_process_group,
    take_place,
)
from tests.spawn import free_port

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALIKE = ("a", [("torch", "2.13"), ("the plan", "11aa")])
OTHER = ("b", [("torch", "2.12"), ("the plan", "11aa")])


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")


def plan_of(**sizes: int) -> Plan:
    model = Transformer(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=96, vocab=100, seq_len=8
    )
    return default_plan(build_transformer(model), **sizes)


def answers(devices, told) -> list[str]:
    """What each rank is answered, all at once in threads of this process."""
    store, found = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            found[rank] = _shared_backend(store, rank, len(devices), devices[rank], told[rank])
        except PlanError as error:
            found[rank] = f"refused: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in range(len(devices))]


def test_ranks_that_are_alike_have_their_backend(no_nccl):
    assert answers([CPU] * 4, [ALIKE] * 4) == ["gloo"] * 4


@pytest.mark.parametrize("rank", range(3))
def test_a_backend_that_any_rank_lacks_is_told_by_all_in_the_same_words(no_nccl, rank):
    devices = [CPU] * 3
    devices[rank] = GPU
    (line,) = set(answers(devices, [ALIKE] * 3))
    assert line.startswith(f"refused: rank {rank}: ranks on cuda talk through nccl")


def test_nodes_that_differ_are_named_by_all_ranks(no_nccl):
    (line,) = set(answers([CPU] * 3, [ALIKE, OTHER, ALIKE]))
    assert line == (
        "refused: torch is not the same on all nodes: 2.13 on a; 2.12 on b; give all nodes the same"
    )


def test_ranks_that_have_one_gpu_are_named(monkeypatch, no_nccl):
    """A launcher showed two ranks the same."""
    monkeypatch.setattr("planner.runtime.process.device.backend", lambda device: "nccl")
    own = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}
    monkeypatch.setattr("planner.runtime.process.device.identity", lambda d: own[d.index])
    gpus = [torch.device("cuda", rank) for rank in range(3)]
    (line,) = set(answers(gpus, [ALIKE] * 3))
    assert line == (
        "refused: ranks 0, 2 have one GPU (GPU-a), and each needs its own; start one rank for each "
        "GPU, or let the launcher show each rank another"
    )
    own.update({0: "", 1: "", 2: ""})  # what can't be told is not refused
    assert answers(gpus, [ALIKE] * 3) == ["nccl"] * 3


def test_a_lone_process_is_enough_for_a_plan_of_one_rank_only():
    with pytest.raises(PlanError, match="the plan is for 4 ranks and this is a lone process"):
        start_process_group(plan_of(dp=2, pp=2), CPU)
    assert not dist.is_initialized()
    start_process_group(plan_of(), CPU)
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)


def test_a_rank_meets_the_others_where_its_variables_say(monkeypatch):
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    start_process_group(plan_of(), CPU)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 3


def test_a_backend_that_does_not_start_is_one_line(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no route to host\nat ProcessGroupGloo.cpp:1")

    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(PlanError) as raised:
        start_process_group(plan_of(), CPU)
    assert str(raised.value) == (
        "rank 0 on cpu can't start gloo, through which ranks on cpu talk (no route to host); mend "
        "that, or use `device` cpu"
    )


def test_a_rank_of_another_launcher_takes_the_variables_of_torch(monkeypatch):
    """Those that are set already, by torchrun, stay."""
    srun = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "9",
            "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "n[3-4]"}  # fmt: skip
    for name, value in srun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    take_place()
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"
    }  # fmt: skip
    assert os.environ["MASTER_ADDR"] == "n3"
    monkeypatch.setattr(os, "environ", srun | {"WORLD_SIZE": "4"})
    take_place()
    assert os.environ == srun | {"WORLD_SIZE": "4"}


def test_a_process_that_no_launcher_started_stays_alone():
    before = dict(os.environ)
    take_place()
    assert dict(os.environ) == before
