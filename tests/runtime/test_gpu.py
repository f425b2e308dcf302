"""The runtime on GPUs and NCCL, and what stands in for them here.

P28 (device-side job times), G12 (streams apart, memory not given away early), P16 (delays change
nothing). What needs a GPU is marked so; the device's clock is tried on a made-up device too.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.schedule.registry import SCHEDULES
from planner.runtime.process import recorder as recorders
from planner.runtime.process.recorder import Recorder
from planner.runtime.step.engine import Engine
from planner.timeline import load_timeline
from tests.runtime.scenarios import capture, train_beside_one_process
from tests.spawn import free_port


def needs(num_gpus: int) -> Callable[[Any], Any]:
    """Mark a test as one for this many GPUs."""
    absent = torch.cuda.device_count() < num_gpus

    def mark(test: Any) -> Any:
        skip = pytest.mark.skipif(absent, reason=f"needs {num_gpus} GPU{'s' * (num_gpus > 1)}")
        return pytest.mark.gpu(skip(test))

    return mark


class Device:
    """A made-up device: its work is done when `now_s` says so, which `wait` moves on."""

    def __init__(self) -> None:
        self.now_s = self.given_s = 0.0
        self.waited = 0

    def work(self, seconds: float) -> None:
        self.given_s += seconds

    def wait(self, _device: Any = None) -> None:
        self.waited += 1
        self.now_s = self.given_s

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(at_s=0.0)
        event.record = lambda: setattr(event, "at_s", self.given_s)
        event.query = lambda: event.at_s <= self.now_s
        event.synchronize = self.wait
        event.elapsed_time = lambda later: (later.at_s - event.at_s) * 1e3
        return event


@pytest.fixture
def device(monkeypatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
    monkeypatch.setattr(recorders, "_memory_counter", lambda _: lambda _now_s: 7)
    monkeypatch.setattr(recorders.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(recorders.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(recorders, "perf_counter", lambda: 1000.0 + made.now_s)
    return made


def _recorder(folder: Path) -> Recorder:
    mesh = SimpleNamespace(
        device=torch.device("cuda", 0),
        rank=lambda _: 0,
        group=lambda _: None,
        lowered_groups=dict,
    )
    return Recorder(folder, mesh)  # type: ignore[arg-type]


def _spans(folder: Path) -> list[tuple[str, int, float, float]]:
    (line,) = load_timeline(folder)
    return [(s.name, s.step, s.start_s - 1000.0, s.end_s - 1000.0) for s in line.spans]


def test_spans_are_the_devices_and_nobody_waits_for_them(device, tmp_path):
    """P28: a job is asked for at once and done later."""
    recorder = _recorder(tmp_path)
    waited = device.waited
    for name, seconds in (("F0.0", 0.25), ("B0.0", 0.5)):
        with recorder.span(name[0], name, 0, 0):
            device.work(seconds)
    recorder.end_step()
    assert _spans(tmp_path) == []
    device.now_s = 0.3  # the first is done
    recorder.end_step()
    assert _spans(tmp_path) == [("F0.0", 0, 0.0, 0.25)]
    assert device.waited == waited
    recorder.close()
    assert _spans(tmp_path)[1:] == [("B0.0", 0, 0.25, 0.75)]


def test_the_devices_clock_is_set_again(device, tmp_path):
    """Two clocks drift apart: after ten seconds the device's starts from the host's anew."""
    recorder = _recorder(tmp_path)
    waited = device.waited
    with recorder.span("F", "F0.0", 0, 0):
        device.work(11.0)
    device.now_s = 11.0
    recorder.end_step()
    assert device.waited > waited
    with recorder.span("F", "F0.1", 0, 1):
        device.work(1.0)
    recorder.close()
    assert _spans(tmp_path) == [("F0.0", 0, 0.0, 11.0), ("F0.1", 1, 11.0, 12.0)]


@needs(1)
def test_a_job_on_a_gpu_takes_as_long_as_the_gpu_was_busy(tmp_path, monkeypatch):
    """P28: a kernel of known length, within 5%, though Python is done with it at once."""
    monkeypatch.setattr(recorders.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(recorders.dist, "get_world_size", lambda: 1)
    recorder, cycles = _recorder(tmp_path), 200_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    known_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for m in range(2):
        with recorder.span("F", f"F0.{m}", 0, m):
            torch.cuda._sleep(cycles)
    assert time.perf_counter() - start_s < known_s / 2
    recorder.close()
    (line,) = load_timeline(tmp_path)
    for span in line.spans:
        assert span.end_s - span.start_s == pytest.approx(known_s, rel=0.05)
        assert span.memory_bytes >= 0
    assert line.spans[1].start_s >= line.spans[0].end_s


def _rank(rank: int, world_size: int, port: int, cases: list[tuple[str, Plan]]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    rng, begin = random.Random(rank), Engine._before_backward

    def late(self: Engine, stage_index: int, is_last: bool) -> None:
        # The device falls behind, and then Python does.
        torch.cuda._sleep(rng.randrange(10_000_000))
        time.sleep(rng.random() * 5e-3)
        begin(self, stage_index, is_last)

    Engine._before_backward = late  # type: ignore[method-assign]
    for name, plan in cases:
        gaps = train_beside_one_process(name, plan).gaps
        assert gaps.loss < 1e-10, (plan.schedule, gaps)
        assert gaps.gradient < 1e-8, (plan.schedule, gaps)


def _train(world_size: int, cases: list[tuple[str, Plan]]) -> None:
    """Train each case on this many GPUs, with delays, beside one process on the CPU."""
    arguments = (world_size, free_port(), cases)
    torch.multiprocessing.spawn(_rank, arguments, nprocs=world_size)


@needs(1)
def test_one_gpu_equals_one_process():
    """Several microbatches, and both ways to recompute."""
    graph = capture("deep-gpt", torch.float64)
    plans = [
        default_plan(graph, num_microbatches=2),
        default_plan(graph, num_microbatches=2, recompute="full"),
        default_plan(graph, num_microbatches=2, recompute="selective"),
    ]
    _train(1, [("deep-gpt", plan) for plan in plans])


@needs(2)
@pytest.mark.timeout(900)
def test_every_schedule_on_two_gpus_equals_one_process():
    """G12, P16: messages on NCCL's streams while jobs run, in both directions at once."""
    graph = capture("deep-gpt", torch.float64)
    plans = [
        default_plan(graph, pp=2, vpp=max(spec.min_vpp, 1), num_microbatches=6, schedule=name)
        for name, spec in sorted(SCHEDULES.items())
    ]
    plans.append(default_plan(graph, pp=2, num_microbatches=6, recompute="full"))
    plans.append(plans[0].model_copy(update={"receive_ahead": 0}))
    _train(2, [("deep-gpt", plan) for plan in plans])
