"""Every difference between a CPU rank on gloo and a rank on an accelerator, in one place.

An accelerator is what this PyTorch has (`torch.accelerator`): CUDA and ROCm GPUs, or what a
package adds that PyTorch loads by itself. Its module (`of`) has streams, events and memory under
the names of ``torch.cuda``; its backend is the one that is registered for it with
`torch.distributed`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.nodes.nccl import MESSAGE_BLOCKS
from planner.runtime.process.environment import BACKEND, DEVICE, DEVICES, LAUNCHER
from planner.runtime.process.groups import staged
from planner.runtime.process.host.cores import available_cores, near_cores, stay_on


def accelerator() -> str | None:
    """Return the type of the accelerator that is here ("cuda"), or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def device_types() -> list[str]:
    """Return what ranks may run on by this PyTorch: the CPU and its accelerator, here or not."""
    built_for = torch.accelerator.current_accelerator()
    return ["cpu", "cuda" if built_for is None else built_for.type]


def device_type(name: str | None) -> str:
    """Return the type of device that a name asks for; None: the accelerator that is here, if any.

    Raises PlanError for a type that this PyTorch does not have.
    """
    name = name or accelerator() or "cpu"
    if name not in device_types():
        raise PlanError(
            f"device {name!r} is unknown; use {' or '.join(device_types())}, which this PyTorch has"
        )
    return name


def num_devices(kind: str) -> int:
    """Return how many accelerators of a type are here; on a CPU ranks need none."""
    return 0 if kind == "cpu" else int(torch.get_device_module(kind).device_count())


def choose_device(name: str | None = None) -> torch.device:
    """Return this process's device: ``cpu``, or the accelerator of its local rank.

    `name` is a type of device or None (the environment's PLANNER_DEVICE, else an accelerator when
    there is one). Local rank i takes the i-th of PLANNER_DEVICES, or accelerator i; the only
    accelerator that is here, where the launcher shows each rank its own (that two ranks don't have
    one is told when they meet). Over `staged` ranks share accelerators. Raises PlanError when an
    accelerator is asked for and none is left for this rank.
    """
    kind = device_type(name or os.environ.get(DEVICE))
    if kind == "cpu":
        return torch.device("cpu")
    local_rank, here = int(os.environ.get("LOCAL_RANK", "0")), num_devices(kind)
    listed = os.environ.get(DEVICES)
    numbers = [int(number) for number in listed.split(",")] if listed else list(range(here))
    if numbers and is_staged():
        local_rank %= len(numbers)
    elif here == 1 and listed is None:
        local_rank = 0
    if local_rank >= len(numbers):
        raise PlanError(
            f"local rank {local_rank} needs its own GPU; "
            f"this machine has {here}{f', of which {listed} are listed' if listed else ''}; "
            "launch fewer ranks here, or use `device` cpu"
        )
    return torch.device(kind, numbers[local_rank])


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory, streams and a clock beside the host's."""
    return device.type != "cpu"


def identity(device: torch.device) -> str:
    """Return what tells an accelerator from all others; empty where nothing does, or on a CPU."""
    if not is_accelerator(device):
        return ""
    return str(getattr(of(device).get_device_properties(device), "uuid", ""))


def of(device: torch.device) -> ModuleType:
    """Return the module of an accelerator, ``torch.cuda`` or one with its names."""
    return torch.get_device_module(device)


def prepare(device: torch.device) -> None:
    """Bind this thread to its device, and a rank of ours to the cores near that."""
    if not is_accelerator(device):
        return
    of(device).set_device(device)
    if LAUNCHER in os.environ:
        stay_on(near_cores(of(device).get_device_properties(device)) & available_cores())


def refuse_blocking_launches(pp: int, kind: str) -> None:
    """Raise PlanError where each kernel is waited for, on a type of device, and pp > 1.

    A receive is a kernel that runs until its message comes, and it is launched before what the
    peer waits for: each rank would wait in its own.
    """
    blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    if blocks and pp > 1 and kind != "cpu" and not is_staged():
        raise PlanError(
            f"CUDA_LAUNCH_BLOCKING is set, and with pp={pp} ranks would wait for ever, each for a "
            "receive that it has begun early; unset it, or look for the error with `device` cpu"
        )


def backend(device: torch.device) -> str:
    """Return the communication backend of a device, or `staged` where PLANNER_BACKEND says so.

    Raises PlanError when this PyTorch was built without it.
    """
    if is_staged():
        staged.register()
        return staged.NAME
    name = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(name):
        raise PlanError(
            f"ranks on {device.type} talk through {name}, which this PyTorch is built without; "
            "install a PyTorch that has it, or use `device` cpu"
        )
    return name


def is_staged() -> bool:
    """Whether ranks talk through `staged`, and several may share an accelerator.

    Raises PlanError where PLANNER_BACKEND names another backend.
    """
    chosen = os.environ.get(BACKEND)
    if chosen not in (None, "", staged.NAME):
        raise PlanError(
            f"{BACKEND}={chosen} is unknown; use {staged.NAME}, or leave it unset for the "
            "device's own"
        )
    return chosen == staged.NAME


def bound_to(device: torch.device) -> torch.device | None:
    """Return the device that a process group is bound to from its start, if any."""
    # (torch asks a bound group for its backend in C++, which one in Python has not.)
    return device if is_accelerator(device) and not is_staged() else None


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Inside, what is drawn leaves the generators of the host and of a device as they were."""
    if is_accelerator(device):
        return torch.random.fork_rng(devices=[device], device_type=device.type)
    return torch.random.fork_rng(devices=[])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if is_accelerator(device):
        of(device).synchronize(device)


def message_options(device: torch.device, timeout: timedelta) -> Any:
    """Return the backend's options of groups that carry messages between stages; None: its own.

    NCCL's own variables come first where the user has set them.
    """
    if backend(device) != "nccl" or {"NCCL_MAX_CTAS", "NCCL_MAX_P2P_NCHANNELS"} & set(os.environ):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MESSAGE_BLOCKS
    options._timeout = timeout  # (torch warns of options with another than it is given itself)
    return options


def p2p_needs_own_groups(device: torch.device) -> bool:
    """Whether each direction between two ranks needs a communicator of its own.

    NCCL runs what one communicator is given in order, so a send behind a receive that
    waits would wait too; so does `staged`. Gloo matches by tag.
    """
    return is_accelerator(device) or is_staged()
