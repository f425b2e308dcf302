"""What saving a checkpoint costs the training.

Transformer layers are trained on this CPU's ranks, one thread each, in turns of so many steps:
one with a save at its start, the next without. A turn's time is that of the slowest rank; medians
are reported, the share that a save adds to its turn, and how long `engine.save` itself took. The
turn should be longer than a save takes: then what is told is all that a save costs, in CPU time
that the ranks miss, copies and waiting. The CPU time is told apart: it is of use on a machine that
does other things as well. (With a GPU the writing has the host's cores for itself.)

Last a save without training beside it is timed, from its call until the checkpoint is whole, and
against it the disk alone: the ranks write as many bytes, a file each, with the same `fsync`.

    python benchmarks/checkpoints.py [--ranks 1] [--zero 0] [--steps 20] [--turns 8] [--hidden 256]
    python benchmarks/checkpoints.py --ranks 2 --zero 3 --hidden 2048 --turns 1 --steps 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.layers import LayerChain
from planner.capture import capture_module
from planner.language.lowering.defaults import default_plan
from planner.runtime.checkpoint.folder import checkpoints_in
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.step.engine import Engine
from tests import spawn

SEQUENCE = 64
PIECE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a turn with a save and without, by the clock and of a rank's CPU.

    `call` is that of `engine.save` alone; `nbytes` are those of a checkpoint. `whole` is a save
    without training beside it, `disk` the writing of as many bytes without planner.
    """

    with_save: float
    without: float
    cpu_with_save: float
    cpu_without: float
    call: float
    nbytes: int
    whole: float
    disk: float


def measure(options: Any, folder: str) -> Times:
    """Train in turns on this rank."""
    torch.manual_seed(0)
    samples = options.samples // options.ranks
    module = LayerChain(options.layers, hidden=options.hidden, heads=4)
    two, three = (_batch(options, size) for size in (2, 3))
    graph = capture_module(module, two, three)
    plan = default_plan(
        graph,
        dp=options.ranks,
        zero_stage=options.zero,
        num_microbatches=1,
        microbatch_size=samples,
    )
    engine = Engine(plan, graph, module, build_mesh(plan, torch.device("cpu")))
    batch = _batch(options, plan.global_batch)
    for _ in range(3):
        engine.step(batch)
    engine.save(folder)
    engine.wait_for_save()
    turns: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    calls = []
    for turn in range(2 * options.turns):
        saves = turn % 2 == 0
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        if saves:
            engine.save(folder, keep=1)
            calls.append(time.perf_counter() - began)
        for _ in range(options.steps):
            engine.step(batch)
        turns[saves].append(_slowest(time.perf_counter() - began))
        engine.wait_for_save()
        cpu[saves].append(_slowest(time.process_time() - cpu_began))
    (newest, *_) = checkpoints_in(Path(folder))
    nbytes = sum(path.stat().st_size for path in newest.iterdir())
    alone = {"whole": [], "disk": []}
    for _ in range(3):
        alone["whole"].append(_timed(lambda: (engine.save(folder, keep=1), engine.wait_for_save())))
        alone["disk"].append(_timed(lambda: _write(Path(folder), nbytes // options.ranks)))
    return Times(
        with_save=statistics.median(turns[True]),
        without=statistics.median(turns[False]),
        cpu_with_save=statistics.median(cpu[True]),
        cpu_without=statistics.median(cpu[False]),
        call=statistics.median(calls),
        nbytes=nbytes,
        whole=statistics.median(alone["whole"]),
        disk=statistics.median(alone["disk"]),
    )


def _timed(work: Callable[[], object]) -> float:
    """The seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return _slowest(time.perf_counter() - began)


def _write(folder: Path, nbytes: int) -> None:
    """Write bytes that no file system can pack, as a rank writes its file."""
    path = folder / f"plain-{dist.get_rank()}"
    piece = os.urandom(PIECE_BYTES)
    with open(path, "wb") as file:
        for start in range(0, nbytes, PIECE_BYTES):
            file.write(piece[: nbytes - start])
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _batch(options: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, SEQUENCE, options.hidden)
    return x, x.flip(0)


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        *(("ranks", 1), ("zero", 0), ("steps", 20), ("turns", 8)),
        *(("hidden", 256), ("layers", 8), ("samples", 16)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="on the disk that is meant; else one for scratch files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn.TIMEOUT_S = 3600  # gigabytes take their time
        times = spawn.run_ranks(measure, options.ranks, options, folder)[0]
    added = times.with_save - times.without
    cpu = times.cpu_with_save - times.cpu_without
    print(
        f"checkpoint of {times.nbytes / 1e6:.0f} MB, {options.steps} steps a turn\n"
        f"turn without a save {times.without:.3f} s, with one {times.with_save:.3f} s: "
        f"{added:+.3f} s, {added / times.without:+.1%}\n"
        f"CPU time {times.cpu_without:.3f} s and {times.cpu_with_save:.3f} s: {cpu:+.3f} s, "
        f"{cpu / times.cpu_without:+.1%}\n"
        f"engine.save returned after {times.call * 1e3:.1f} ms\n"
        f"whole after {times.whole:.2f} s without training beside it "
        f"({times.nbytes / times.whole / 1e6:.0f} MB/s); the disk alone takes {times.disk:.2f} s "
        f"({times.nbytes / times.disk / 1e6:.0f} MB/s)"
    )


if __name__ == "__main__":
    main()
