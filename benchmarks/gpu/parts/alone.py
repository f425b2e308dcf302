"""One rank on one device: what parts that train share."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.cases import MODEL, StepCase
from benchmarks.gpu.results import Setting

WARM_UP = 2
STEPS = 5


def be_alone(setting: Setting) -> None:
    """Set what a launcher sets for a rank, for one that is the only one."""
    from planner.runtime.start.workers import rank_environment
    from profiles.measure.nodes.launchers import free_port

    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    own |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    # Allocator settings too, which must be there before the first tensor.
    os.environ.update({**rank_environment(1, setting.device), **own})
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) if setting.device == "cuda" else 1))


def builder(case: StepCase) -> Callable[[], Any]:
    """Return the function that makes a case's model."""
    from planner.capture.source.model_file import load_model_file

    return load_model_file(MODEL).with_arguments(case.arguments).build


def batch_of(case: StepCase) -> dict[str, Any]:
    """Return a whole batch of a case, on the host in pinned memory where there is a GPU."""
    import torch

    from benchmarks.gpu.decoder import batch

    made = batch(case.microbatch_size * case.num_microbatches, case.sequence)
    if torch.cuda.is_available():
        made = {name: tensor.pin_memory() for name, tensor in made.items()}
    return made


def wait(device: str) -> None:
    """Return when the device has done all it was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def step_seconds(step: Callable[[], Any], setting: Setting, *, steps: int = STEPS) -> float:
    """Return the median seconds of a step, after a few that warm up."""
    from statistics import median

    for _ in range(WARM_UP):
        step()
    samples = []
    for _ in range(steps):
        wait(setting.device)
        began = time.perf_counter()
        step()
        wait(setting.device)
        samples.append(time.perf_counter() - began)
    return median(samples)


def peak_bytes(step: Callable[[], Any], setting: Setting) -> dict[str, float]:
    """Return the most that tensors took in a step, and that the allocator held; {} on a CPU."""
    if setting.device != "cuda":
        return {}
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait(setting.device)
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "tensor_bytes": float(stats["active_bytes.all.peak"]),
        "reserved_bytes": float(stats["reserved_bytes.all.peak"]),
        "peak_bytes": float(stats["reserved_bytes.all.peak"])
        + float(total - free - torch.cuda.memory_reserved()),
    }


@contextmanager
def freed(setting: Setting) -> Iterator[None]:
    """Give back afterwards what was trained inside: engines hold cycles."""
    try:
        yield
    finally:
        gc.collect()
        if setting.device == "cuda":
            import torch

            torch.cuda.empty_cache()
