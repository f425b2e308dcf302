"""The doctor on accelerators, with stand-ins for PyTorch builds and GPUs that are not here."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from planner.doctor.devices import check_devices
from planner.nodes.check import Check
from planner.units import GIB


def fake_torch(
    kinds: tuple[str, ...] = ("H100", "H100"),
    *,
    free: tuple[int, ...] = (80, 80),
    built: tuple[str, ...] = ("sm_80", "sm_90"),
    capability: tuple[int, int] = (9, 0),
    peers: bool = True,
    cuda: str | None = "13.0",
    backends: tuple[str, ...] = ("gloo", "nccl"),
) -> Any:
    """A PyTorch with these GPUs."""
    module = SimpleNamespace(
        device_count=lambda: len(kinds),
        get_device_name=lambda index: kinds[index],
        mem_get_info=lambda index: (free[index] * GIB, 80 * GIB),
    )
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        accelerator=SimpleNamespace(
            current_accelerator=lambda check_available: (
                SimpleNamespace(type="cuda") if kinds else None
            )
        ),
        get_device_module=lambda device: module,
        distributed=SimpleNamespace(
            is_available=lambda: True, is_backend_available=lambda name: name in backends
        ),
        cuda=SimpleNamespace(
            nccl=SimpleNamespace(version=lambda: (2, 28, 3)),
            get_arch_list=lambda: list(built),
            get_device_capability=lambda index: capability,
            can_device_access_peer=lambda a, b: peers,
        ),
    )


def found(**changes: Any) -> dict[str, Check]:
    return {finding.name: finding for finding in check_devices(fake_torch(**changes))}


def test_gpus_in_order():
    told = found()
    assert told["GPUs"].found == "2 x H100"
    assert told["backends"].found == "gloo, nccl 2.28.3"
    assert told["GPU memory"].found == "80.00 GiB each, free"
    assert {finding.state for finding in told.values()} == {"ok"}


def test_unlike_gpus_memory_in_use_and_no_way_between():
    told = found(kinds=("H100", "A100"), free=(80, 20), peers=False)
    assert "one kind" in told["GPUs"].advice
    assert told["GPU memory"].found == "GPU 1: 20.00 GiB free"
    assert told["links of GPUs"].found == "2 of 2 pairs can't, such as (0, 1)"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ("sm_90",), True),
        ((8, 6), ("sm_80",), True),  # a smaller minor of the same major
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90",), False),
        ((12, 0), ("sm_90", "compute_90"), True),  # translated when it is loaded
        ((10, 0), ("sm_100a",), True),
    ],
)
def test_kernels_for_the_architecture(capability, built, runs):
    assert ("CUDA kernels" not in found(capability=capability, built=built)) == runs


def test_a_driver_without_a_pytorch_for_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert found(kinds=(), cuda=None)["GPUs"].state == "ok"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    told = found(kinds=(), cuda=None)["GPUs"]
    assert told.state == "problem"
    assert "for CPUs" in told.found


def test_without_gloo_ranks_can_t_meet():
    assert found(backends=("nccl",))["backends"].state == "problem"


def test_the_pytorch_that_is_here():
    told = {finding.name for finding in check_devices()}
    assert {"PyTorch", "backends", "GPUs"} <= told
