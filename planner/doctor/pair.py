"""Two ranks of this node that start and sum a tensor, as ranks of a training do.

The module is what a rank runs, too: ``python -P -m planner.doctor.pair FOLDER RANK DEVICE``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from planner.nodes.check import Check, judged

LIMIT_S = 90.0
"""Seconds in which both must be through: PyTorch loads slowly from a shared file system."""

_ENTRIES = 2**16


def check_pair(command: tuple[str, ...] = ("-P", "-m", "planner.doctor.pair")) -> Iterator[Check]:
    """Yield a finding on two ranks on the CPU, and on two GPUs where there are as many.

    `command` is what Python runs as a rank.
    """
    import torch

    yield _exchange("cpu", command)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and torch.get_device_module(found).device_count() > 1:
        yield _exchange(found.type, command)


def _exchange(device: str, command: tuple[str, ...]) -> Check:
    name = f"two ranks on {'CPU' if device == 'cpu' else 'GPUs'}"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        logs = [Path(folder) / f"rank-{rank}" for rank in range(2)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                arguments = [sys.executable, *command, folder, str(rank), device]
                ranks.append(subprocess.Popen(arguments, stdout=out, stderr=out))
        try:
            for process in ranks:
                process.wait(max(0.0, started + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            return judged(
                name,
                f"they were not through after {LIMIT_S:.0f} s",
                problem="look at the host's name and at GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; "
                "NCCL_DEBUG=INFO says what NCCL waits for",
            )
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        failed = [log for log, process in zip(logs, ranks, strict=True) if process.returncode]
        if failed:
            advice = "no plan can train here before this works"
            return judged(name, _last_line(failed[0]), problem=advice)
    return judged(name, f"exchanged, {time.monotonic() - started:.1f} s with their start")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "a rank ended without a word"


def main(folder: str, rank: int, kind: str) -> None:
    """Sum a tensor with the other rank, and check the sum."""
    import torch
    import torch.distributed as dist

    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LIMIT_S),
    )
    values = torch.full((_ENTRIES,), float(rank + 1), device=device)
    dist.all_reduce(values)
    if not bool((values == 3.0).all()):
        raise SystemExit(f"rank {rank} got a wrong sum: {values[:4].tolist()}, not 3.0 each")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
