"""Schedules under slow links: the simulator's step time against the executor's.

The real executor runs the tables, on gloo ranks; each message is held back as if its link took
that many job times for one message, one after the other. Jobs take a set time by sleeping in
them (F, I and W alike), which needs no core and so is exact on a small machine. With `--real`
they compute instead: the jobs of a first run are timed, and their medians are what the simulator
is told. `blocking` is 1F1B where a sender waits until its message has arrived: nothing overlaps.

For each case: predicted and measured step, and the gain over 1F1B under the same delay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Result, benchmark, on_ranks
from planner.language.schedule import JobKind, build_schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from tests.runtime.slow_links import sleep_in_jobs, slow_down_links

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
    torch.manual_seed(0)  # every rank has the same model, and gives the same batch
    model = Chain(2 * ranks, width)
    batch = dict.fromkeys(("x", "target"), torch.randn(num_microbatches, rows, width))
    two, three = ({k: v[:n] for k, v in batch.items()} for n in (2, 3))
    graph = capture_module(model, two, three)
    plan = default_plan(graph, pp=ranks, num_microbatches=num_microbatches, schedule=case.table)
    engine = planner.apply(plan, model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    spans = _JobClock()
    engine._executor._spans.recorder = spans  # type: ignore[assignment]
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
        self,
        kind: str,
        name: str,
        stage: int = -1,
        microbatch: int = -1,
        *,
        on_host: bool = False,
        lane: str = "",
    ) -> Iterator[None]:
        """Time what happens inside, but for waiting."""
        start_s = time.perf_counter()
        yield
        if kind in list(JobKind):
            self._seconds.setdefault(kind, []).append(time.perf_counter() - start_s)
            self.busy_s += self._seconds[kind][-1]

    def end_step(self) -> None:
        """Write nothing: what is read is the median of all steps."""

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


@benchmark("delays", quick={"microbatches": 4, "steps": 2, "transfers": (0.5,)})
def delays(
    *,
    ranks: int = 2,
    microbatches: int = 8,
    job_ms: float = 20.0,
    transfers: Annotated[tuple[float, ...], "of a message, in times of a job"] = (0.0, 0.5, 1.0),
    schedules: tuple[str, ...] = ("1f1b", BLOCKING, "eager_1f1b", "zb_h1"),
    steps: int = 5,
    real: Annotated[bool, "compute in the jobs"] = False,
) -> Result:
    size = {"ranks": ranks, "num_microbatches": microbatches, "steps": steps}
    job_s = None if real else job_ms / 1e3
    return Result(on_ranks(ranks, _rows_of, transfers, schedules, job_s, size)[0])


def _rows_of(
    transfers: tuple[float, ...], schedules: tuple[str, ...], job_s: float | None, size: Any
) -> list[Row]:
    unit_s = job_s
    if unit_s is None:  # A transfer is in units of the forward, as it computes here.
        _, _, found = measure_case(Case(schedule="1f1b", transfer_s=0.0), job_s=None, **size)
        unit_s = statistics.mean(found.forward_s)
    cases = [
        Case(schedule=name, transfer_s=transfer * unit_s)
        for transfer in transfers
        for name in schedules
    ]
    return measure_rows(cases, job_s=job_s, **size)
