"""Our pipeline runtime against torch.distributed.pipelining, step for step.

The same model, data, microbatches and SGD step, on gloo ranks with one thread each, in one
launch: for each schedule both have, steps of the two alternate, so that whatever else the
machine does hits both. A step's time is that of the slowest rank; the median is reported,
and the ratio ours / torch.

    python benchmarks/pipeline.py [--ranks 2 4] [--steps 15] [--hidden 128] [--json rows.json]

Also measured, on one rank: the time a job takes beyond the computation it wraps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

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
    """Median step times of one schedule on one number of ranks."""

    schedule: str
    ranks: int
    ours_s: float
    torch_s: float
    ratio: float


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
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for ranks in options.ranks:
        rows += _launch(ranks, options)
    for row in rows:
        print(
            f"{row.schedule:22} {row.ranks} ranks  ours {row.ours_s * 1e3:8.1f} ms  "
            f"torch {row.torch_s * 1e3:8.1f} ms  ratio {row.ratio:.3f}"
        )
    overhead_us = _launch(1, options)
    print(f"overhead of a job beyond its computation: {overhead_us:.0f} us")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": [asdict(r) for r in rows], "job_overhead_us": overhead_us}, file)


def _launch(ranks: int, options: argparse.Namespace) -> Any:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (ranks, port, queue, options), nprocs=ranks)
    return queue.get()


def _rank(rank: int, ranks: int, port: int, queue: Any, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    if ranks == 1:
        queue.put(_job_overhead_us())
    else:
        rows = [
            _measure(rank, ranks, *schedule, options)
            for schedule in SCHEDULES
            if schedule[0] in options.schedules
        ]
        if rank == 0:
            queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


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
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for turn in range(options.steps + 3):
        for label, step in (("ours", ours), ("torch", theirs)):
            dist.barrier()
            start_s = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start_s)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 3:
                times[label].append(took.item())
    ours_s, torch_s = (statistics.median(times[label]) for label in ("ours", "torch"))
    return Row(schedule=name, ranks=ranks, ours_s=ours_s, torch_s=torch_s, ratio=ours_s / torch_s)


def _our_step(
    ranks: int, name: str, vpp: int, num_microbatches: int, model: Model, x: Tensor, target: Tensor
) -> Callable[[], Any]:
    import planner
    from planner.capture import capture_module
    from planner.plan_defaults import default_plan

    batch = {"x": x, "target": target}
    two, three = ({k: v[:n] for k, v in batch.items()} for n in (2, 3))
    plan = default_plan(
        capture_module(model, two, three),
        pp=ranks,
        vpp=vpp,
        microbatch_size=2,
        num_microbatches=num_microbatches,
        schedule=name,
    )
    engine = planner.apply(plan, model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    return lambda: engine.step(batch)


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
) -> Callable[[], Any]:
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

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(
            *([x] if has_first else []),
            **({"target": target, "losses": []} if has_last else {}),
        )
        optimizer.step()

    return step


def _job_overhead_us() -> float:
    """A job's time beyond a plain call and backward of the same program, on a tiny model."""
    import planner
    from planner.capture import capture_module
    from planner.plan_defaults import default_plan

    num_microbatches = 64
    batch = dict.fromkeys(("x", "target"), torch.randn(num_microbatches, SEQUENCE, 8))
    two, three = ({k: v[:n] for k, v in batch.items()} for n in (2, 3))
    model = Model(2, 8)
    graph = capture_module(model, two, three)
    plan = default_plan(graph, num_microbatches=num_microbatches, schedule="1f1b")
    engine = planner.apply(plan, model, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    (stage,) = engine.stages.values()
    microbatch = {k: v[:1] for k, v in batch.items()}
    inputs = [microbatch[graph.tensor[n].fqn] for n in stage.wiring.side_inputs]

    def plain() -> None:
        for _ in range(num_microbatches):
            stage(*inputs)[0].backward(engine._loss_scale)

    times: dict[str, list[float]] = {"step": [], "plain": []}
    for _ in range(20):
        for label, run in (("step", lambda: engine.step(batch)), ("plain", plain)):
            start_s = time.perf_counter()
            run()
            times[label].append(time.perf_counter() - start_s)
    step_s, plain_s = (statistics.median(times[label][5:]) for label in ("step", "plain"))
    return (step_s - plain_s) / (2 * num_microbatches) * 1e6


if __name__ == "__main__":
    main()
