"""The clock of a rank: what other processes take from its core is not counted."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from profiles.measure.grid import standard_grid
from profiles.measure.timing import clock as clocks
from profiles.measure.timing import collective_timing
from profiles.measure.timing.clock import CYCLES_PER_S, Clock
from profiles.measure.timing.timing import OpTimer


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spin(seconds_on_core):
    until = time.thread_time() + seconds_on_core
    while time.thread_time() < until:
        pass


def test_time_away_from_the_core_is_not_compute():
    """Sleeping stands for another process on the core: 20 ms of work in 60 ms of wall time."""
    clock = Clock(torch.device("cpu"), own_core=True)

    def disturbed():
        spin(0.02)
        time.sleep(0.04)

    assert clock.time(disturbed)[0] > 0.055
    assert clock.time_compute(disturbed)[0] == pytest.approx(0.02, rel=0.2)


def test_without_a_core_of_its_own_a_rank_counts_the_wait():
    """More ranks than cores: they wait for each other in training too."""
    clock = Clock(torch.device("cpu"), own_core=False)
    assert clock.time_compute(lambda: time.sleep(0.03))[0] > 0.029


@pytest.mark.parametrize("probe", standard_grid("cpu")[::23], ids=str)
def test_every_kind_of_probe_runs_here(probe):
    """Forward and backward samples, cold and warm, all positive."""
    clock = Clock(torch.device("cpu"), own_core=True)
    samples = OpTimer(clock).visit(probe.to_json(), seconds=0.0)
    assert {name for name, found in samples.items() if found} == set(samples)
    assert all(seconds > 0 for found in samples.values() for seconds in found)


def test_a_busy_machine_does_not_show_in_the_median(one_thread):
    """Three hogs on every core slow the wall clock, not the time on the core."""
    probe = standard_grid("cpu")[13].to_json()
    timer = OpTimer(Clock(torch.device("cpu"), own_core=True))

    def median():
        found = sorted(timer.visit(probe, seconds=0.2)["forward"])
        return found[len(found) // 2]

    quiet = median()
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(3 * (torch.multiprocessing.cpu_count()))
    ]
    try:
        time.sleep(0.2)
        busy = median()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert busy < 2 * quiet


class Gpu:
    """A made-up GPU beside its host: a call takes `issue_s` of the host, `run_s` of the device."""

    def __init__(self, *, issue_s: float, run_s: float) -> None:
        self.issue_s, self.run_s = issue_s, run_s
        self.host_s = self.busy_until_s = 0.0

    def call(self) -> None:
        self.host_s += self.issue_s
        self.busy_until_s = max(self.busy_until_s, self.host_s) + self.run_s

    def sleep(self, cycles: int) -> None:
        self.busy_until_s = max(self.busy_until_s, self.host_s) + cycles / CYCLES_PER_S

    def synchronize(self, _device=None) -> None:
        self.host_s = max(self.host_s, self.busy_until_s)

    def event(self, **_):
        event = SimpleNamespace(at_s=0.0, synchronize=self.synchronize)
        # An event of an idle device is at the host's time.
        event.record = lambda: setattr(event, "at_s", max(self.busy_until_s, self.host_s))
        event.elapsed_time = lambda later: (later.at_s - event.at_s) * 1e3
        return event


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu(issue_s=40e-6, run_s=10e-6)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: made.host_s))
    return made


def test_a_collective_is_timed_at_the_pace_of_the_device(gpu, monkeypatch):
    """100 calls of 10 us that take the host 40 us each: 10 us, as the host issues them ahead."""
    monkeypatch.setattr(collective_timing, "_collective", lambda *_: gpu.call)
    monkeypatch.setattr(collective_timing, "_agreed", lambda seconds, *_: seconds)
    found = collective_timing.time_collective(
        "all_reduce", 1024, None, clock=Clock(torch.device("cuda")), seconds=0.05
    )
    assert found["seconds"] == pytest.approx([10e-6] * len(found["seconds"]), rel=0.01)


def test_clocks_settle_as_training_will_run(gpu, monkeypatch):
    """On products of bfloat16, which draw the power that training draws."""
    made = []
    randn = torch.randn

    def on_host(*sizes, device, **options):
        made.append(options.get("dtype", torch.float32))
        return randn(1, 1, **options)

    monkeypatch.setattr(torch, "randn", on_host)
    monkeypatch.setattr(torch, "mm", lambda a, b: gpu.call())
    ticks = iter(range(1000))
    monkeypatch.setattr(clocks.time, "monotonic", lambda: 0.3 * next(ticks), raising=False)
    clocks.settle_clocks(torch.device("cuda"))
    assert made == [torch.bfloat16]
