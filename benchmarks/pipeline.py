"""Our pipeline runtime against torch.distributed.pipelining, step for step.

The same model, data, microbatches and SGD step, on gloo ranks with one thread each, in one
launch: for each schedule both have, steps of the two take turns, so that whatever else the
machine does hits both; which goes first alternates too. A step's time is that of the slowest
rank; the median is reported, and the ratio ours / torch. Both must find the same losses.

    python benchmarks/pipeline.py [--ranks 2 4] [--steps 15] [--hidden 128] [--json [rows.json]]

Also measured: the time a job takes beyond the computation it wraps, on one rank and, with
messages, on two. It is the CPU time of the rank's thread, in which waiting does not count.
And what recording a timeline adds to a step: steps with and without take turns on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from planner.runtime.engine import Engine
from planner.runtime.workers import TIMELINE_DIR

SEQUENCE = 32

# Our name, torch's class, stages per rank, and whether torch places them in a V.
SCHEDULES = [
    ("fthenb", "ScheduleGPipe", 1, False),
    ("1f1b", "Schedule1F1B", 1, False),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", 2, False),
    ("looped_breadth_first", "ScheduleLoopedBFS", 2, False),
    ("zb_v", "ScheduleZBVZeroBubble", 2, True),
    ("dualpipe_v", "ScheduleDualPipeV", 2, True),
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Median step times of one schedule on one number of ranks.

    `cpu_ratio` is that of the CPU seconds of all ranks: what is left where the machine is busy
    with other things and waiting says little.
    """

    schedule: str
    ranks: int
    ours_s: float
    torch_s: float
    ratio: float
    cpu_ratio: float


class Layer(nn.Module):
    """A transformer layer of plain PyTorch."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 4, h // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A chain of layers with a mean square loss at its end."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def main() -> None:
    """Measure, print a table, and write rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--schedules", nargs="+", default=[s[0] for s in SCHEDULES])
    parser.add_argument("--json", nargs="?", const="-", help="print rows, or write them here")
    options = parser.parse_args()
    rows = [row for ranks in options.ranks for row in _launch(ranks, _measure_all, options)]
    overhead_us = {ranks: _launch(ranks, _job_overhead_us, options) for ranks in (1, 2)}
    recording = _launch(2, _recording_overhead, options)
    result = {
        "rows": [asdict(row) for row in rows],
        "job_overhead_us": overhead_us[1],
        "job_overhead_with_messages_us": overhead_us[2],
        "recording_overhead": recording,
    }
    if options.json == "-":
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        print(
            f"{row.schedule:22} {row.ranks} ranks  ours {row.ours_s * 1e3:8.1f} ms  "
            f"torch {row.torch_s * 1e3:8.1f} ms  ratio {row.ratio:.3f} "
            f"(of CPU time {row.cpu_ratio:.3f})"
        )
    print(
        f"a job beyond its computation: {overhead_us[1]:.0f} us, "
        f"with gloo's calls to send and receive {overhead_us[2]:.0f} us"
    )
    print(f"recording a timeline adds {recording:.2%} to the CPU time of a 1f1b step")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file)


def _launch(ranks: int, measure: Callable[..., Any], options: argparse.Namespace) -> Any:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, folder, measure, queue, options), nprocs=ranks)
    return queue.get()


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    measure: Callable[..., Any],
    queue: Any,
    options: argparse.Namespace,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    result = measure(rank, ranks, options)
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()


def _measure_all(rank: int, ranks: int, options: argparse.Namespace) -> list[Row]:
    chosen = [schedule for schedule in SCHEDULES if schedule[0] in options.schedules]
    return [_measure(rank, ranks, *schedule, options) for schedule in chosen]


def _measure(
    rank: int,
    ranks: int,
    name: str,
    torch_name: str,
    vpp: int,
    is_v: bool,
    options: argparse.Namespace,
) -> Row:
    num_microbatches, layers = 2 * ranks, 8
    x, target = torch.randn(2, num_microbatches * 2, SEQUENCE, options.hidden)
    torch.manual_seed(0)
    model = Model(layers, options.hidden)
    theirs = _torch_step(rank, ranks, torch_name, vpp, is_v, num_microbatches, model, x, target)
    ours = _our_step(ranks, name, vpp, num_microbatches, model, x, target)
    _check_losses(ours(), theirs(), is_v=is_v, rank=rank, ranks=ranks)
    sides = [("ours", ours), ("torch", theirs)]
    times: dict[str, list[tuple[float, float]]] = {label: [] for label, _ in sides}
    for turn in range(options.steps + 3):
        for label, step in sides if turn % 2 else reversed(sides):
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            step()
            took = torch.tensor(time.perf_counter() - start_s)
            cpu = torch.tensor(time.process_time() - start_cpu_s)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(cpu)
            if turn >= 3:
                times[label].append((took.item(), cpu.item()))
    medians = [[statistics.median(column) for column in zip(*times[n], strict=True)] for n in times]
    (ours_s, ours_cpu_s), (torch_s, torch_cpu_s) = medians
    return Row(
        schedule=name,
        ranks=ranks,
        ours_s=ours_s,
        torch_s=torch_s,
        ratio=ours_s / torch_s,
        cpu_ratio=ours_cpu_s / torch_cpu_s,
    )


def _check_losses(ours: Tensor, theirs: list[Tensor], *, is_v: bool, rank: int, ranks: int) -> None:
    """Both trained on the same: `theirs` are the microbatches' losses, on the last stage's rank."""
    if rank == (0 if is_v else ranks - 1):
        torch.testing.assert_close(ours, torch.stack(theirs).mean().detach())


def _our_step(
    ranks: int, name: str, vpp: int, num_microbatches: int, model: Model, x: Tensor, target: Tensor
) -> Callable[[], Any]:
    engine = _our_engine(ranks, name, vpp, num_microbatches, model, x, target)
    return lambda: engine.step({"x": x, "target": target})


def _our_engine(
    ranks: int, name: str, vpp: int, num_microbatches: int, model: Model, x: Tensor, target: Tensor
) -> Engine:
    import planner
    from planner.capture import capture_module
    from planner.plan_defaults import default_plan

    two, three = ({"x": x[:n], "target": target[:n]} for n in (2, 3))
    plan = default_plan(
        capture_module(model, two, three),
        pp=ranks,
        vpp=vpp,
        microbatch_size=2,
        num_microbatches=num_microbatches,
        schedule=name,
    )
    return planner.apply(plan, model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))


def _torch_step(
    rank: int,
    ranks: int,
    name: str,
    vpp: int,
    is_v: bool,
    num_microbatches: int,
    model: Model,
    x: Tensor,
    target: Tensor,
) -> Callable[[], list[Tensor]]:
    import copy

    from torch.distributed.pipelining import PipelineStage, schedules

    num_stages = ranks * vpp
    homes = [2 * ranks - 1 - s if is_v and s >= ranks else s % ranks for s in range(num_stages)]
    per_stage = len(model.layers) // num_stages
    stages = [
        PipelineStage(
            nn.Sequential(*copy.deepcopy(model.layers[s * per_stage : (s + 1) * per_stage])),
            s,
            num_stages,
            torch.device("cpu"),
        )
        for s in range(num_stages)
        if homes[s] == rank
    ]
    kind = getattr(schedules, name)
    argument: Any = stages[0] if vpp == 1 else stages
    schedule = kind(argument, num_microbatches, loss_fn=F.mse_loss)
    params = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=1e-3)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([x] if has_first else []),
            **({"target": target, "losses": losses} if has_last else {}),
        )
        optimizer.step()
        return losses

    return step


def _job_overhead_us(rank: int, ranks: int, _: argparse.Namespace) -> float:
    """A job's time beyond a plain call and backward of the same programs, on a tiny model."""
    import planner
    from planner.capture import capture_module
    from planner.graph import size_at
    from planner.plan_defaults import default_plan

    num_microbatches = 64
    batch = dict.fromkeys(("x", "target"), torch.randn(num_microbatches, SEQUENCE, 8))
    two, three = ({k: v[:n] for k, v in batch.items()} for n in (2, 3))
    model = Model(2 * ranks, 8)
    graph = capture_module(model, two, three)
    plan = default_plan(graph, pp=ranks, num_microbatches=num_microbatches, schedule="1f1b")
    engine = planner.apply(plan, model, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    (stage,) = engine.stages.values()
    side = [batch[graph.tensor[n].fqn][:1] for n in stage.wiring.side_inputs]
    shapes = [[size_at(size, 1) for size in edge.shape] for edge in stage.wiring.incoming]
    arrived = [torch.randn(shape).requires_grad_() for shape in shapes]
    grads = [torch.ones_like(output) for output in stage(*arrived, *side, num_samples=1)]

    def plain() -> None:
        for _ in range(num_microbatches):
            torch.autograd.backward(stage(*arrived, *side, num_samples=1), grads)

    times: dict[str, list[float]] = {"step": [], "plain": []}
    for _ in range(25):
        for label, run in (("step", lambda: engine.step(batch)), ("plain", plain)):
            dist.barrier()
            start_s = time.thread_time()
            run()
            times[label].append(time.thread_time() - start_s)
    step_s, plain_s = (statistics.median(times[label][5:]) for label in ("step", "plain"))
    overhead_us = torch.tensor((step_s - plain_s) / (2 * num_microbatches) * 1e6)
    dist.all_reduce(overhead_us, dist.ReduceOp.MAX)
    return overhead_us.item()


def _recording_overhead(rank: int, ranks: int, options: argparse.Namespace) -> float:
    """The part by which recording lengthens a 1F1B step, in CPU time, as a mean over ranks.

    Steps with and without follow each other, and the median of their differences counts: the
    machine's speed drifts by more than what recording costs.
    """
    num_microbatches = 2 * ranks
    x, target = torch.randn(2, num_microbatches * 2, SEQUENCE, options.hidden)
    model = Model(8, options.hidden)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TIMELINE_DIR] = folder
        engine = _our_engine(ranks, "1f1b", 1, num_microbatches, model, x, target)
        del os.environ[TIMELINE_DIR]
        recorder = engine._recorder
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(10 * options.steps + 3):
            for records in (True, False) if turn % 2 else (False, True):
                engine._recorder = engine._executor._recorder = recorder if records else None
                dist.barrier()
                start_s = time.thread_time()
                engine.step({"x": x, "target": target})
                if turn >= 3:
                    times[records].append(time.thread_time() - start_s)
    differences = [on - off for on, off in zip(times[True], times[False], strict=True)]
    added = torch.tensor(statistics.median(differences) / statistics.median(times[False]))
    dist.all_reduce(added)
    return added.item() / ranks


if __name__ == "__main__":
    main()
