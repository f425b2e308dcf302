"""What the watchdog tells of a device that works behind the host: where the device is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.runtime.process import device as devices
from planner.runtime.step.device_marks import DeviceMarks
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny


class Device:
    """A device that has passed the first `passed` of its events."""

    def __init__(self) -> None:
        self.recorded, self.passed, self.made = 0, 0, 0

    def event(self) -> SimpleNamespace:
        self.made += 1
        number = 0

        def record() -> None:
            nonlocal number
            self.recorded += 1
            number = self.recorded

        return SimpleNamespace(record=record, query=lambda: number <= self.passed)


@pytest.fixture
def device(monkeypatch) -> Device:
    made = Device()
    monkeypatch.setattr(devices, "of", lambda _: SimpleNamespace(Event=made.event))
    return made


def engine_on(device: Device) -> planner.Engine:
    plan = default_plan(capture_tiny("mlp"), num_microbatches=2, microbatch_size=2)
    module = MlpWithTarget()
    engine = planner.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    engine._executor._marks = DeviceMarks(torch.device("cpu"))
    return engine


def test_a_rank_is_where_its_device_is(device):
    """The host has done the step; the device has not, or stands still in it."""
    engine = engine_on(device)
    engine.step(mlp_batch(4))
    jobs = len(engine._executor.jobs)
    told = []
    for device.passed in (*range(jobs), jobs - 1, jobs):
        status = engine._executor.status()
        told.append((status.text, status.is_busy, status.progress))
    first, *others = told
    assert first[0].startswith("job 0F0 (forward of stage 0")
    assert [text for text, _, _ in others[-2:]] == [others[-3][0], "between two steps"]
    assert [busy for _, busy, _ in told] == [*[True] * (jobs + 1), False]
    # Each job that the device has done is a move.
    assert [progress - first[2] for _, _, progress in told] == [*range(jobs), jobs - 1, jobs]


def test_events_are_used_again(device):
    engine = engine_on(device)
    jobs = len(engine._executor.jobs)
    for _ in range(5):
        engine.step(mlp_batch(4))
        device.passed = device.recorded
    assert device.made == jobs
