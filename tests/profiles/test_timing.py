"""The clock of a rank: what other processes take from its core is not counted."""

import subprocess
import sys
import time

import pytest
import torch

from profiles.measure.grid import standard_grid
from profiles.measure.timing.clock import Clock
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
