"""Every difference between a CPU rank on gloo and a GPU rank on NCCL, in one place."""

from __future__ import annotations

import os

import torch

from planner.errors import PlanError


def choose_device(name: str | None = None) -> torch.device:
    """Return this process's device: ``cpu``, or the GPU of its local rank.

    `name` is ``cpu``, ``cuda`` or None (the environment's PLANNER_DEVICE, else a GPU when
    there is one). Raises PlanError when a GPU is asked for and none is left for this rank.
    """
    name = name or os.environ.get("PLANNER_DEVICE")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise PlanError(f"device {name!r} is unknown; use cpu or cuda")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise PlanError(
            f"local rank {index} needs its own GPU; this machine has {torch.cuda.device_count()}; "
            "launch fewer ranks here, or use `device` cpu"
        )
    return torch.device("cuda", index)


def prepare(device: torch.device) -> None:
    """Bind this process to its device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def backend(device: torch.device) -> str:
    """Return the communication backend of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def p2p_needs_own_groups(device: torch.device) -> bool:
    """Whether each direction between two ranks needs a communicator of its own.

    NCCL runs what one communicator is given in order, so a send behind a receive that
    waits would wait too. Gloo matches by tag.
    """
    return device.type == "cuda"
