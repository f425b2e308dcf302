"""Accelerators of this node, what this PyTorch can do with them, and its backends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from planner.nodes.check import Check, judged
from planner.units import format_bytes

_LEAST_FREE = 0.9
"""Part of a GPU's memory that should be free before a training: plans fill it."""


_KINDS = ("sm_", "compute_")


def check_devices(torch: Any = None) -> Iterator[Check]:
    """Yield findings on PyTorch's build, its backends and the accelerators that it sees.

    `torch` is the library, or what stands for it.
    """
    if torch is None:
        import torch
    yield judged("PyTorch", f"{torch.__version__}, {_build(torch)}")
    yield _check_backends(torch)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        yield _check_none(torch)
        return
    module = torch.get_device_module(found)
    count = int(module.device_count())
    kinds = [str(module.get_device_name(index)) for index in range(count)]
    unlike = "a plan takes GPUs of one kind: choose some with `devices`, or write a cluster file"
    yield judged(
        "GPUs",
        ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        warning=unlike if len(set(kinds)) > 1 else "",
    )
    yield from _check_memory(module, count)
    if found.type == "cuda":
        yield from _check_kernels(torch, count)
        yield from _check_links(torch, count)


def _build(torch: Any) -> str:
    if getattr(torch.version, "cuda", None):
        return f"CUDA {torch.version.cuda}"
    if getattr(torch.version, "hip", None):
        return f"ROCm {torch.version.hip}"
    return "for CPUs"


def _check_backends(torch: Any) -> Check:
    dist = torch.distributed
    if not dist.is_available():
        advice = "install a PyTorch that has it: pip install torch"
        return judged("backends", "this PyTorch has no torch.distributed", problem=advice)
    names = [name for name in ("gloo", "nccl", "ucc", "mpi") if dist.is_backend_available(name)]
    missing = "" if "gloo" in names else "ranks meet through gloo: install a PyTorch that has it"
    if "nccl" in names and torch.version.cuda:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        names[names.index("nccl")] = f"nccl {version}"
    return judged("backends", ", ".join(names) or "none", problem=missing)


def _check_none(torch: Any) -> Check:
    if not any(map(shutil.which, ("nvidia-smi", "rocm-smi"))):
        return judged("GPUs", "none: planner can plan here for others, and train on CPUs")
    return judged(
        "GPUs",
        f"a GPU driver is installed, but PyTorch ({_build(torch)}) sees no GPU",
        problem="install the PyTorch that is built for your driver, and look at "
        "CUDA_VISIBLE_DEVICES; nvidia-smi shows what the driver sees",
    )


def _check_memory(module: Any, count: int) -> Iterator[Check]:
    if not hasattr(module, "mem_get_info"):
        return
    sizes = [module.mem_get_info(index) for index in range(count)]
    taken = [index for index, (free, total) in enumerate(sizes) if free < _LEAST_FREE * total]
    if taken:
        told = ", ".join(f"GPU {index}: {format_bytes(sizes[index][0])} free" for index in taken)
        advice = "end what else runs there (nvidia-smi names it): plans count on all of it"
        yield judged("GPU memory", told, warning=advice)
    else:
        least = min(total for _, total in sizes)
        yield judged("GPU memory", f"{format_bytes(least)} each, free")


def _check_kernels(torch: Any, count: int) -> Iterator[Check]:
    """Whether PyTorch's kernels are for the GPUs' architecture.

    A kernel of sm_XY runs on each device of the same X and no smaller Y; one of compute_XY is
    translated for any later device (CUDA C++ Programming Guide, "Binary compatibility").
    """
    built = torch.cuda.get_arch_list()
    of = {kind: [_version(name) for name in built if name.startswith(kind)] for kind in _KINDS}
    for index in range(count):
        own = tuple(torch.cuda.get_device_capability(index))
        runs = any(version[0] == own[0] and version <= own for version in of["sm_"])
        if not runs and not any(version <= own for version in of["compute_"]):
            yield judged(
                "CUDA kernels",
                f"GPU {index} is sm_{own[0]}{own[1]}; this PyTorch has {', '.join(built)}",
                problem="install a PyTorch built for that architecture",
            )


def _version(architecture: str) -> tuple[int, int]:
    digits = "".join(c for c in architecture.partition("_")[2] if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def _check_links(torch: Any, count: int) -> Iterator[Check]:
    """Whether a GPU can read the memory of each other one."""
    if count < 2:
        return
    apart = [
        pair
        for pair in permutations(range(count), 2)
        if not torch.cuda.can_device_access_peer(*pair)
    ]
    if not apart:
        yield judged("links of GPUs", "each GPU reaches each other's memory")
        return
    yield judged(
        "links of GPUs",
        f"{len(apart)} of {count * (count - 1)} pairs can't, such as {apart[0]}",
        warning="messages between them go through the host: nvidia-smi topo -m shows why (PCIe "
        "ACS, a virtual machine), and a measured profile prices it",
    )
