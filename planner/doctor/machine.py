"""Cores, memory, limits, disk and clock of this node."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from planner.cache_folder import cache_dir
from planner.nodes.check import Check, judged
from planner.units import GIB, KIB, MIB, format_bytes

_LEAST_SHARED = GIB
"""Of /dev/shm: NCCL's shared-memory transport and workers of loaders put their buffers there, and a
container's default of 64 MiB ends them with a bus error (NCCL user guide, Troubleshooting)."""

_LEAST_FILES = 4096
"""Open files of a process: each rank holds sockets to all others, and files of its loaders."""

_MANY_FILES = 65536

_LEAST_FREE_DISK = 10 * GIB

_LEAST_FREE_MEMORY = 0.1
"""Part of the node's memory."""


def check_machine(
    *, proc: Path = Path("/proc"), shared: Path = Path("/dev/shm")
) -> Iterator[Check]:
    """Yield findings on this node; `proc` and `shared` are where the kernel shows it."""
    yield from _check_cores()
    yield from _check_memory(proc / "meminfo")
    if shared.is_dir():
        yield _check_shared(shared)
    yield from _check_limits()
    yield _check_folder(
        "cache folder",
        cache_dir(),
        needs=256 * MIB,
        locked="set XDG_CACHE_HOME to a folder of yours: without it each command captures anew",
    )
    yield _check_folder(
        "working folder", Path.cwd(), needs=_LEAST_FREE_DISK, locked="work in a folder of yours"
    )
    yield from _check_clock()


def _check_cores() -> Iterator[Check]:
    here = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here
    yield judged("cores", f"{mine} of {here} usable" if mine < here else f"{here}")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        yield judged(
            "threads",
            f"OMP_NUM_THREADS={threads} is set",
            warning="planner shares the cores among the ranks of a node itself; unset it",
        )


def _check_memory(meminfo: Path) -> Iterator[Check]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    sizes = {line.split(":")[0]: int(line.split()[1]) * KIB for line in lines if ":" in line}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    low = "end what holds it: a rank that gets none is killed"
    yield judged(
        "memory",
        f"{format_bytes(free)} of {format_bytes(total)} available",
        warning=low if free < _LEAST_FREE_MEMORY * total else "",
    )


def _check_shared(shared: Path) -> Check:
    total = shutil.disk_usage(shared).total
    small = "give the container more: docker run --shm-size=8g, or --ipc=host"
    return judged(
        "shared memory",
        f"{format_bytes(total)} in {shared}",
        warning=small if total < _LEAST_SHARED else "",
    )


def _check_limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    more = _MANY_FILES if hard == unlimited else min(hard, _MANY_FILES)
    yield judged(
        "open files",
        "no limit" if soft == unlimited else f"{soft} at most",
        warning=f"ulimit -n {more}" if soft != unlimited and soft < _LEAST_FILES else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if Path("/dev/infiniband").is_dir() and locked != unlimited:
        yield judged(
            "locked memory",
            f"{format_bytes(locked)} at most, and this node has InfiniBand",
            problem="ulimit -l unlimited: RDMA registers the buffers that it sends from",
        )


def _check_folder(name: str, folder: Path, *, needs: int, locked: str) -> Check:
    """`locked` is what to do where it can't be written."""
    there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    if not os.access(there, os.W_OK):
        return judged(name, f"{folder} can't be written", warning=locked)
    free = shutil.disk_usage(there).free
    full = "free some space: captures, plans, checkpoints and traces are written"
    found = f"{folder}, {format_bytes(free)} free"
    return judged(name, found, warning=full if free < needs else "")


def _check_clock() -> Iterator[Check]:
    """Whether a server sets the clock: timelines of several nodes are set side by side."""
    if shutil.which("timedatectl") is None:
        return
    asked = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return
    if told == "yes":
        yield judged("clock", "set by a time server")
    elif told == "no":
        advice = "start chrony or systemd-timesyncd: logs of nodes are compared by their times"
        yield judged("clock", "not set by a time server", warning=advice)
