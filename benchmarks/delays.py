"""Schedules under slow links: the simulator's step time against the executor's.

    python benchmarks/delays.py [--ranks 2] [--microbatches 8] [--job-ms 20] [--transfers 0 0.5 1]
                                [--schedules 1f1b eager_1f1b zb_h1] [--real] [--json [rows.json]]

The real executor runs the tables, on gloo ranks; each message is held back as if its link took
that many job times for one message, one after the other. Jobs take a set time by sleeping in
them (F, I and W alike), which needs no core and so is exact on a small machine. With `--real`
they compute instead: the jobs of a first run are timed, and their medians are what the simulator
is told. `blocking` is 1F1B where a sender waits until its message has arrived: nothing overlaps.

For each case: predicted and measured step, and the gain over 1F1B under the same delay.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.language.schedule import Job, JobKind, JobSeconds, build_schedule, simulate
from planner.runtime.step.engine import Engine
from planner.runtime.step.messages.p2p import Crossing, Message, Post

BLOCKING = "blocking"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run: a schedule (or `blocking`), and the seconds a message spends on its link."""

    schedule: str
    transfer_s: float

    @property
    def table(self) -> str:
        """The name of the schedule whose table is run."""
        return "1f1b" if self.schedule == BLOCKING else self.schedule


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: seconds of a step, the part of it a rank waits on average, gain over 1F1B."""

    schedule: str
    transfer_s: float
    predicted_s: float
    measured_s: float
    predicted_idle: float
    measured_idle: float
    predicted_gain: float = 0.0
    measured_gain: float = 0.0


class SlowLink(threading.Thread):
    """Sends one rank's messages after a delay, one after the other. Mutable: a thread."""

    def __init__(self, transfer_s: float) -> None:
        super().__init__(daemon=True)
        self._transfer_s = transfer_s
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def send(self, send: Any) -> Sent:
        """Call `send`, which returns its work, when the message has crossed the link."""
        sent = Sent()
        self._queue.put((time.perf_counter(), send, sent))
        return sent

    def run(self) -> None:
        """Let one message after the other cross."""
        free_s = 0.0
        while True:
            given_s, send, sent = self._queue.get()
            free_s = max(free_s, given_s) + self._transfer_s
            time.sleep(max(0.0, free_s - time.perf_counter()))
            send().wait()
            sent.done.set()


class Sent:
    """A message on a slow link, as `torch.distributed.Work`."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return self.done.is_set()

    def wait(self) -> None:
        """Wait until it has."""
        self.done.wait()


class SlowGroup:
    """A process group whose sends go over slow links. Stands in for one in a `Post`'s legs."""

    def __init__(self, group: Any, link: SlowLink) -> None:
        self._group, self._link = group, link
        self.recv = group.recv

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Sent:
        """Send later."""
        return self._link.send(lambda: self._group.send(tensors, peer, tag))


def slow_down_links(engine: Engine, transfer_s: float, *, blocking: bool = False) -> None:
    """Hold back what an engine sends; with `blocking` the sender waits for its arrival."""
    post: Post = engine._executor._post
    links: dict[int, SlowLink] = defaultdict(lambda: SlowLink(transfer_s))
    find = post._find_crossing

    def find_slow(*key: Any) -> Crossing:
        crossing = find(*key)
        legs = (
            replace(leg, group=SlowGroup(leg.group, links[crossing.target]))  # type: ignore[arg-type]
            for leg in crossing.legs
        )
        return replace(crossing, legs=tuple(legs))

    post._find_crossing = find_slow  # type: ignore[method-assign]
    if not blocking:
        return
    put = post.put

    def put_and_wait(message: Message, tensor: Tensor) -> None:
        put(message, tensor)
        for sending in post._sending:
            sending.work.wait()

    post.put = put_and_wait  # type: ignore[method-assign]
    # Who waits for its message to arrive gains nothing by sending it within a job.
    engine._executor._sends_first = {}


class Arrival:
    """A receive whose message sets out when it is posted, as `torch.distributed.Work`."""

    def __init__(self, work: Any, transfer_s: float) -> None:
        self._work, self._there_s = work, time.perf_counter() + transfer_s

    def wait(self) -> None:
        """Wait until the message has been sent, and has crossed the link."""
        self._work.wait()
        time.sleep(max(0.0, self._there_s - time.perf_counter()))


class WaitingGroup:
    """A process group whose messages set out no sooner than there is a buffer for them, as those
    too large for a network's own do. Stands in for one in a `Post`'s legs.
    """

    def __init__(self, group: Any, transfer_s: float) -> None:
        self._group, self._transfer_s = group, transfer_s
        self.send = group.send

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Arrival:
        """Post a buffer: the message sets out."""
        return Arrival(self._group.recv(tensors, peer, tag), self._transfer_s)


def send_when_posted(engine: Engine, transfer_s: float) -> None:
    """Let what an engine receives take `transfer_s` from when its buffer is posted."""
    post: Post = engine._executor._post
    find = post._find_crossing

    def find_waiting(*key: Any) -> Crossing:
        crossing = find(*key)
        legs = (replace(leg, group=WaitingGroup(leg.group, transfer_s)) for leg in crossing.legs)  # type: ignore[arg-type]
        return replace(crossing, legs=tuple(legs))

    post._find_crossing = find_waiting  # type: ignore[method-assign]


def sleep_in_jobs(engine: Engine, job_s: float) -> None:
    """Make every job of an engine take `job_s` (a full backward twice that) on top."""
    executor = engine._executor
    computing = executor._computing

    @contextmanager
    def slower(job: Job, *args: Any) -> Iterator[None]:
        with computing(job, *args):
            time.sleep(job_s * (2 if job.kind is JobKind.FULL_BACKWARD else 1))
            yield

    executor._computing = slower  # type: ignore[method-assign]


class Chain(nn.Module):
    """Linear layers of one width with a mean square loss at their end."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss; `x` and `target` are [samples, rows, width]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, target)


def measure_case(
    case: Case, *, ranks: int, num_microbatches: int, job_s: float | None, steps: int
) -> tuple[float, float, JobSeconds]:
    """Return a case's step, the idle part of it, and its jobs' seconds; on every rank.

    With `job_s` jobs sleep; without, they compute.
    """
    import planner
    from planner.capture import capture_module
    from planner.language.lowering.defaults import default_plan

    rows, width = (4, 8) if job_s else (256, 256)
    model = Chain(2 * ranks, width)
    torch.manual_seed(0)  # every rank gives the same batch
    batch = dict.fromkeys(("x", "target"), torch.randn(num_microbatches, rows, width))
    two, three = ({k: v[:n] for k, v in batch.items()} for n in (2, 3))
    graph = capture_module(model, two, three)
    plan = default_plan(graph, pp=ranks, num_microbatches=num_microbatches, schedule=case.table)
    engine = planner.apply(plan, model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    spans = _JobClock()
    engine._executor._recorder = spans  # type: ignore[assignment]
    if job_s:
        sleep_in_jobs(engine, job_s)
    slow_down_links(engine, case.transfer_s, blocking=case.schedule == BLOCKING)
    took, idle = [], []
    for turn in range(steps + 1):
        spans.begin()
        dist.barrier()
        start_s = time.perf_counter()
        engine.step(batch)
        times = torch.tensor([time.perf_counter() - start_s, 0.0])
        times[1] = 1 - spans.busy_s / times[0]
        dist.all_reduce(times[:1], dist.ReduceOp.MAX)
        dist.all_reduce(times[1:])
        if turn:
            took.append(times[0].item())
            idle.append(times[1].item() / ranks)
    # What else the machine does only makes sleepers late; computing varies both ways.
    typical = min if job_s else statistics.median
    return typical(took), typical(idle), spans.job_seconds(ranks, case.transfer_s)


class _JobClock:
    """Stands in for the recorder: seconds of jobs by kind. Mutable: it adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self.busy_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.busy_s = 0.0

    @contextmanager
    def span(
        self, kind: str, name: str, stage: int = -1, microbatch: int = -1, *, on_host: bool = False
    ) -> Iterator[None]:
        """Time what happens inside, but for waiting."""
        start_s = time.perf_counter()
        yield
        if kind in list(JobKind):
            self._seconds.setdefault(kind, []).append(time.perf_counter() - start_s)
            self.busy_s += self._seconds[kind][-1]

    def job_seconds(self, ranks: int, transfer_s: float) -> JobSeconds:
        """Return the median job of each kind and rank; a B is taken as half I, half W."""
        mine = {kind: statistics.median(s) for kind, s in self._seconds.items()}
        backward_s = mine.get("B", 0.0)
        found = [mine["F"], mine.get("I", backward_s / 2), mine.get("W", backward_s / 2)]
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, found)
        forward_s, backward_input_s, backward_weight_s = zip(*everyone, strict=True)
        return JobSeconds(
            forward_s=forward_s,
            backward_input_s=backward_input_s,
            backward_weight_s=backward_weight_s,
            receive_forward_s=(transfer_s,) * ranks,
            receive_backward_s=(transfer_s,) * ranks,
        )


def predict_case(
    case: Case, times: JobSeconds, *, ranks: int, num_microbatches: int
) -> tuple[float, float]:
    """Return the simulated step and the idle part of it."""
    schedule = build_schedule(case.table, pp=ranks, vpp=1, num_microbatches=num_microbatches)
    if case.schedule != BLOCKING:
        timeline = simulate(schedule, times)
        return timeline.makespan_s, timeline.bubble_fraction
    # Whoever sends waits as long as the message is under way: it is part of the sender's jobs.
    h = case.transfer_s
    last = ranks - 1
    waiting = JobSeconds(
        forward_s=tuple(f + h * (s < last) for s, f in enumerate(times.forward_s)),
        backward_input_s=tuple(b + h * (s > 0) for s, b in enumerate(times.backward_input_s)),
        backward_weight_s=times.backward_weight_s,
        receive_forward_s=(0.0,) * ranks,
        receive_backward_s=(0.0,) * ranks,
    )
    step_s = simulate(schedule, waiting).makespan_s
    busy_s = simulate(schedule, times).busy_s
    return step_s, 1 - sum(busy_s) / (ranks * step_s)


def measure_rows(
    cases: list[Case], *, ranks: int, num_microbatches: int, job_s: float | None, steps: int
) -> list[Row]:
    """Run cases on every rank of a process group and set the simulator's answers beside."""
    rows: list[Row] = []
    for case in cases:
        size = {"ranks": ranks, "num_microbatches": num_microbatches}
        measured_s, measured_idle, found = measure_case(case, job_s=job_s, steps=steps, **size)
        times = found
        if job_s:
            times = JobSeconds.equal(
                ranks,
                forward_s=job_s,
                backward_input_s=job_s,
                backward_weight_s=job_s,
                transfer_s=case.transfer_s,
            )
        predicted_s, predicted_idle = predict_case(case, times, **size)
        base = next(
            (r for r in rows if (r.schedule, r.transfer_s) == ("1f1b", case.transfer_s)), None
        )
        rows.append(
            Row(
                schedule=case.schedule,
                transfer_s=case.transfer_s,
                predicted_s=predicted_s,
                measured_s=measured_s,
                predicted_idle=predicted_idle,
                measured_idle=measured_idle,
                predicted_gain=base.predicted_s / predicted_s - 1 if base else 0.0,
                measured_gain=base.measured_s / measured_s - 1 if base else 0.0,
            )
        )
    return rows


def main() -> None:
    """Measure, print a table, and write rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--job-ms", type=float, default=20.0)
    parser.add_argument("--transfers", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", BLOCKING, "eager_1f1b", "zb_h1"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="compute in the jobs")
    parser.add_argument("--json", nargs="?", const="-", help="print rows, or write them here")
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, results, options), nprocs=options.ranks)
    rows: list[Row] = results.get()
    if options.json == "-":
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        print(
            f"{row.schedule:12} transfer {row.transfer_s * 1e3:5.1f} ms  step predicted "
            f"{row.predicted_s * 1e3:7.1f} measured {row.measured_s * 1e3:7.1f} ms  idle predicted "
            f"{row.predicted_idle:5.1%} measured {row.measured_idle:5.1%}  gain over 1f1b "
            f"predicted {row.predicted_gain:+6.1%} measured {row.measured_gain:+6.1%}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows]))


def _rank(rank: int, folder: str, results: Any, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks
    )
    job_s = None if options.real else options.job_ms / 1e3
    size = {"ranks": options.ranks, "num_microbatches": options.microbatches}
    unit_s = job_s
    if unit_s is None:  # A transfer is in units of the forward, as it computes here.
        _, _, found = measure_case(
            Case(schedule="1f1b", transfer_s=0.0), job_s=None, steps=options.steps, **size
        )
        unit_s = statistics.mean(found.forward_s)
    cases = [
        Case(schedule=name, transfer_s=transfer * unit_s)
        for transfer in options.transfers
        for name in options.schedules
    ]
    rows = measure_rows(cases, job_s=job_s, steps=options.steps, **size)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
