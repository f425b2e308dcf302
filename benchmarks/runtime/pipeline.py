"""Our pipeline runtime against torch.distributed.pipelining, step for step.

The same model, data, microbatches and SGD step, on gloo ranks with one thread each, in one
launch: for each schedule both have, steps of the sides take turns, so that whatever else the
machine does hits all; which goes first alternates too. A step's time is that of the slowest
rank; the median is reported, and the ratio ours / torch. All must find the same losses.

Each side has processes of its own, which sleep while another has its turn: what our runtime does
to its process (it puts gloo's socket threads behind the computing ones,
`planner.runtime.process.groups.gloo_threads`) its user gets and torch's user does not. `torch_calm`
is torch with that done for it as well, to tell what of a difference is the threads'. Nobody's ranks
are bound to cores, as `planner launch` would bind ours.

Also measured: the time a job takes beyond the computation it wraps, on one rank and, with
messages, on two. It is the CPU time of the rank's thread, in which waiting does not count.
And what recording a timeline adds to a step: steps with and without take turns on two ranks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Result, benchmark, in_turns, on_ranks, on_worlds
from benchmarks.runtime.layers import LayerChain
from planner.runtime.process.environment import TIMELINE_DIR
from planner.runtime.process.groups.gloo_threads import put_socket_threads_last
from planner.runtime.step.engine import Engine

SEQUENCE = 32

OURS, TORCH, TORCH_CALM = SIDES = ("ours", "torch", "torch_calm")
WARM_UP = 3
"""First turns that do not count."""

SETTLE_S = 2e-3
"""From the end of one side's turn on, its processes need so long to fall asleep."""


class Contest(NamedTuple):
    """A schedule both have: our name, torch's class, stages per rank, whether they lie in a V."""

    name: str
    torch_name: str
    vpp: int
    is_v: bool


CONTESTS = (
    Contest("fthenb", "ScheduleGPipe", 1, False),
    Contest("1f1b", "Schedule1F1B", 1, False),
    Contest("interleaved_1f1b", "ScheduleInterleaved1F1B", 2, False),
    Contest("looped_breadth_first", "ScheduleLoopedBFS", 2, False),
    Contest("zb_v", "ScheduleZBVZeroBubble", 2, True),
    Contest("dualpipe_v", "ScheduleDualPipeV", 2, True),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Median step times of one schedule on one number of ranks.

    `ratio` is ours / torch, `calm_ratio` ours / torch_calm. `cpu_ratio` is that of the CPU
    seconds of all ranks: what is left where the machine is busy with other things and waiting
    says little.
    """

    schedule: str
    ranks: int
    ours_s: float
    torch_s: float
    torch_calm_s: float
    ratio: float
    calm_ratio: float
    cpu_ratio: float


class Timed(NamedTuple):
    """What one side measured of one schedule: its first loss; wall and CPU seconds by step."""

    side: str
    schedule: str
    loss: float
    steps: list[tuple[float, float]]


@benchmark(
    "pipeline",
    quick={
        "ranks": (2,),
        "steps": 2,
        "hidden": 16,
        "layers": 2,
        "repeats": 2,
        "schedules": ("1f1b",),
    },
)
def pipeline(
    *,
    ranks: tuple[int, ...] = (2, 4),
    steps: int = 15,
    hidden: int = 128,
    layers: int = 8,
    repeats: Annotated[int, "steps of which a job's overhead is told"] = 20,
    schedules: tuple[str, ...] = tuple(contest.name for contest in CONTESTS),
) -> Result:
    contests = [contest for contest in CONTESTS if contest.name in schedules]
    rows = [row for size in ranks for row in measure_rows(size, contests, steps, (hidden, layers))]
    alone_us, with_messages_us = (
        on_ranks(size, _job_overhead_us, size, repeats)[0] for size in (1, 2)
    )
    recording = on_ranks(2, _recording_overhead, 2, steps, (hidden, layers))[0]
    return Result(
        rows,
        [
            f"a job beyond its computation: {alone_us:.0f} us, "
            f"with gloo's calls to send and receive {with_messages_us:.0f} us",
            f"recording a timeline adds {recording:.2%} to the CPU time of a 1f1b step",
        ],
    )


def measure_rows(
    ranks: int, contests: list[Contest], steps: int, sizes: tuple[int, int]
) -> list[Row]:
    """Let the sides take turns, each on `ranks` processes of its own."""
    turns = get_context("fork").Barrier(ranks * len(SIDES))
    each = [(side, ranks, contests, steps, sizes, turns) for side in SIDES]
    found = [timed for world in on_worlds(ranks, _measure_side, each) for timed in world[0]]
    return [_row(ranks, contest.name, found) for contest in contests]


def _row(ranks: int, schedule: str, found: list[Timed]) -> Row:
    sides = {timed.side: timed for timed in found if timed.schedule == schedule}
    for timed in sides.values():
        torch.testing.assert_close(timed.loss, sides[OURS].loss, rtol=1e-5, atol=0.0)
    seconds = {s: [statistics.median(c) for c in zip(*sides[s].steps, strict=True)] for s in SIDES}
    (ours_s, ours_cpu_s), (torch_s, torch_cpu_s), (calm_s, _) = (seconds[s] for s in SIDES)
    return Row(
        schedule=schedule,
        ranks=ranks,
        ours_s=ours_s,
        torch_s=torch_s,
        torch_calm_s=calm_s,
        ratio=ours_s / torch_s,
        calm_ratio=ours_s / calm_s,
        cpu_ratio=ours_cpu_s / torch_cpu_s,
    )


def _measure_side(
    side: str, ranks: int, contests: list[Contest], steps: int, sizes: tuple[int, int], turns: Any
) -> list[Timed]:
    """On one rank of one side: what it measured of each schedule."""
    found = [_measure(side, contest, Task.of(ranks, sizes), steps, turns) for contest in contests]
    turns.wait()
    return found


def _measure(side: str, contest: Contest, task: Task, steps: int, turns: Any) -> Timed:
    make = _our_step if side == OURS else _torch_step
    step = make(contest, task)
    if side == TORCH_CALM:
        put_socket_threads_last()
    first = step()
    # (The step of torch's user tells a loss on the last stage's rank only, ours on each.)
    loss = torch.tensor(float("-inf")) if first is None else first.clone()
    dist.all_reduce(loss, dist.ReduceOp.MAX)

    def turn_of(whose: str) -> tuple[float, float] | None:
        turns.wait()
        if whose != side:
            return None
        time.sleep(SETTLE_S)
        return _timed(step)

    sides = {whose: partial(turn_of, whose) for whose in SIDES}
    taken = in_turns(sides, steps, warm_up=WARM_UP)[side]
    return Timed(side, contest.name, loss.item(), taken)


def _timed(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and CPU seconds on all."""
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    step()
    took = torch.tensor(time.perf_counter() - start_s)
    cpu = torch.tensor(time.process_time() - start_cpu_s)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return took.item(), cpu.item()


class Task(NamedTuple):
    """What every side trains: a model on a batch, in so many microbatches."""

    model: LayerChain
    x: Tensor
    target: Tensor
    num_microbatches: int

    @classmethod
    def of(cls, ranks: int, sizes: tuple[int, int]) -> Task:
        """Return the task for so many ranks, of so much hidden and so many layers: the same model
        and batch on each of them.
        """
        hidden, layers = sizes
        torch.manual_seed(0)
        num_microbatches = 2 * ranks
        x, target = torch.randn(2, num_microbatches * 2, SEQUENCE, hidden)
        return cls(LayerChain(layers, hidden=hidden, heads=4), x, target, num_microbatches)


def _our_step(contest: Contest, task: Task) -> Callable[[], Tensor | None]:
    engine = _our_engine(contest, task)
    return lambda: engine.step({"x": task.x, "target": task.target})


def _our_engine(contest: Contest, task: Task) -> Engine:
    import planner
    from planner.capture import capture_module
    from planner.language.lowering.defaults import default_plan

    two, three = ({"x": task.x[:n], "target": task.target[:n]} for n in (2, 3))
    plan = default_plan(
        capture_module(task.model, two, three),
        pp=dist.get_world_size(),
        vpp=contest.vpp,
        microbatch_size=2,
        num_microbatches=task.num_microbatches,
        schedule=contest.name,
    )
    return planner.apply(plan, task.model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))


def _torch_step(contest: Contest, task: Task) -> Callable[[], Tensor | None]:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_stages = ranks * contest.vpp
    homes = [
        2 * ranks - 1 - s if contest.is_v and s >= ranks else s % ranks for s in range(num_stages)
    ]
    layers = task.model.layers
    per_stage = len(layers) // num_stages
    stages = [
        PipelineStage(
            nn.Sequential(*layers[s * per_stage : (s + 1) * per_stage]),
            s,
            num_stages,
            torch.device("cpu"),
        )
        for s in range(num_stages)
        if homes[s] == rank
    ]
    kind = getattr(schedules, contest.torch_name)
    argument: Any = stages[0] if contest.vpp == 1 else stages
    schedule = kind(argument, task.num_microbatches, loss_fn=F.mse_loss)
    params = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=1e-3)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([task.x] if has_first else []),
            **({"target": task.target, "losses": losses} if has_last else {}),
        )
        optimizer.step()
        return torch.stack(losses).mean().detach() if has_last else None

    return step


def _job_overhead_us(ranks: int, repeats: int) -> float:
    """A job's time beyond a plain call and backward of the same programs, on a tiny model."""
    import planner
    from planner.capture import capture_module
    from planner.language.graph import size_at
    from planner.language.lowering.defaults import default_plan

    num_microbatches = 64
    torch.manual_seed(0)  # every rank gives the same batch
    batch = dict.fromkeys(("x", "target"), torch.randn(num_microbatches, SEQUENCE, 8))
    two, three = ({k: v[:n] for k, v in batch.items()} for n in (2, 3))
    model = LayerChain(2 * ranks, hidden=8, heads=4)
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

    sides = {
        "step": lambda: _thread_s(lambda: engine.step(batch)),
        "plain": lambda: _thread_s(plain),
    }
    times = in_turns(sides, repeats, warm_up=repeats // 4)
    step_s, plain_s = (statistics.median(times[label]) for label in sides)
    overhead_us = torch.tensor((step_s - plain_s) / (2 * num_microbatches) * 1e6)
    dist.all_reduce(overhead_us, dist.ReduceOp.MAX)
    return overhead_us.item()


def _thread_s(run: Callable[[], object]) -> float:
    """CPU seconds of this rank's thread, from when all ranks begin."""
    dist.barrier()
    start_s = time.thread_time()
    run()
    return time.thread_time() - start_s


def _recording_overhead(ranks: int, steps: int, sizes: tuple[int, int]) -> float:
    """The part by which recording lengthens a 1F1B step, in CPU time, as a mean over ranks.

    Steps with and without follow each other, and the median of their differences counts: the
    machine's speed drifts by more than what recording costs.
    """
    task = Task.of(ranks, sizes)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TIMELINE_DIR] = folder
        engine = _our_engine(next(c for c in CONTESTS if c.name == "1f1b"), task)
        del os.environ[TIMELINE_DIR]
        recorder = engine._spans.recorder

        def step(records: bool) -> float:
            engine._spans.recorder = recorder if records else None
            return _thread_s(lambda: engine.step({"x": task.x, "target": task.target}))

        sides = {records: partial(step, records) for records in (True, False)}
        times = in_turns(sides, 10 * steps, warm_up=3)
    differences = [on - off for on, off in zip(times[True], times[False], strict=True)]
    added = torch.tensor(statistics.median(differences) / statistics.median(times[False]))
    dist.all_reduce(added)
    return added.item() / ranks
