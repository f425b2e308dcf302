"""What saving a checkpoint costs the training.

Transformer layers are trained on this CPU's ranks, one thread each, in turns of so many steps:
one with a save at its start, the next without. A turn's time is that of the slowest rank; medians
are reported, the share that a save adds to its turn, and how long `engine.save` itself took. The
turn should be longer than a save takes: then what is told is all that a save costs, in CPU time
that the ranks miss, copies and waiting. The CPU time is told apart: it is of use on a machine that
does other things as well. (With a GPU the writing has the host's cores for itself.)

Last a save without training beside it is timed, from its call until the checkpoint is whole, and
against it the disk alone: the ranks write as many bytes, a file each, with the same `fsync`.

Gigabytes: --ranks 2 --zero 3 --hidden 2048 --turns 1 --steps 1.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist

from benchmarks.harness import Result, benchmark, in_turns, on_ranks
from benchmarks.runtime.layers import LayerChain
from planner.capture import capture_module
from planner.language.lowering.defaults import default_plan
from planner.runtime.checkpoint.folder import checkpoints_in
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.step.engine import Engine

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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained, and in which turns."""

    ranks: int
    zero: int
    steps: int
    turns: int
    hidden: int
    layers: int
    samples: int


def measure(sizes: Sizes, folder: str) -> Times:
    """Train in turns on this rank."""
    torch.manual_seed(0)
    module = LayerChain(sizes.layers, hidden=sizes.hidden, heads=4)
    two, three = (_batch(sizes, size) for size in (2, 3))
    graph = capture_module(module, two, three)
    plan = default_plan(
        graph,
        dp=sizes.ranks,
        zero_stage=sizes.zero,
        num_microbatches=1,
        microbatch_size=sizes.samples // sizes.ranks,
    )
    engine = Engine(plan, graph, module, build_mesh(plan, torch.device("cpu")))
    batch = _batch(sizes, plan.global_batch)
    for _ in range(3):
        engine.step(batch)
    engine.save(folder)
    engine.wait_for_save()
    calls: list[float] = []

    def turn(saves: bool) -> tuple[float, float]:
        """Seconds by the clock, and of CPU until the save is whole."""
        dist.barrier()
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        if saves:
            engine.save(folder, keep=1)
            calls.append(time.perf_counter() - began_s)
        for _ in range(sizes.steps):
            engine.step(batch)
        took_s = _slowest(time.perf_counter() - began_s)
        engine.wait_for_save()
        return took_s, _slowest(time.process_time() - cpu_began_s)

    found = in_turns({True: lambda: turn(True), False: lambda: turn(False)}, sizes.turns)
    with_save_s, cpu_with_save_s = map(statistics.median, zip(*found[True], strict=True))
    without_s, cpu_without_s = map(statistics.median, zip(*found[False], strict=True))
    (newest, *_) = checkpoints_in(Path(folder))
    nbytes = sum(path.stat().st_size for path in newest.iterdir())
    alone = in_turns(
        {
            "whole": lambda: _timed(lambda: (engine.save(folder, keep=1), engine.wait_for_save())),
            "disk": lambda: _timed(lambda: _write(Path(folder), nbytes // sizes.ranks)),
        },
        3,
    )
    return Times(
        with_save=with_save_s,
        without=without_s,
        cpu_with_save=cpu_with_save_s,
        cpu_without=cpu_without_s,
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


def _batch(sizes: Sizes, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, SEQUENCE, sizes.hidden)
    return x, x.flip(0)


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


@benchmark("checkpoints", quick={"steps": 1, "turns": 2, "hidden": 32, "layers": 2, "samples": 4})
def checkpoints(
    *,
    ranks: int = 1,
    zero: int = 0,
    steps: Annotated[int, "of a turn"] = 20,
    turns: int = 8,
    hidden: int = 256,
    layers: int = 8,
    samples: int = 16,
    folder: Annotated[str | None, "on the disk that is meant; else one for scratch files"] = None,
) -> Result:
    sizes = Sizes(
        ranks=ranks, zero=zero, steps=steps, turns=turns,
        hidden=hidden, layers=layers, samples=samples,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        times = on_ranks(ranks, measure, sizes, scratch)[0]
    added = times.with_save / times.without - 1
    cpu = times.cpu_with_save / times.cpu_without - 1
    rates = [times.nbytes / seconds / 1e6 for seconds in (times.whole, times.disk)]
    return Result(
        [times],
        [
            f"a save adds {added:+.1%} to a turn of {steps} steps, {cpu:+.1%} of CPU time",
            f"{rates[0]:.0f} MB/s without training beside it; the disk alone {rates[1]:.0f} MB/s",
        ],
    )
