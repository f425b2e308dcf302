"""What is timed beside messages: FSDP2's own work, and ranks that wait for each other."""

from statistics import median
from typing import get_args

import pytest
import torch

from profiles.measure.summary import _step_fits, _wait_fit
from profiles.measure.timing.clock import Clock
from profiles.measure.timing.surroundings import StepSample
from profiles.measure.timing.wait_timing import time_waits
from profiles.measure.timing.zero_timing import time_zero_work
from profiles.records import ZeroWork
from tests.spawn import run_ranks


def _timed() -> tuple[dict, list]:
    torch.set_num_threads(1)
    clock = Clock(torch.device("cpu"))
    small, large = (
        time_zero_work(num_tensors=8, numel=numel, clock=clock, seconds=0.3)
        for numel in (2**6, 2**18)
    )
    return {"small": small, "large": large}, time_waits(clock)


@pytest.fixture(scope="module")
def timed():
    return run_ranks(_timed, 2)


def test_every_part_of_fsdps_work_is_timed(timed):
    for zero, _ in timed:
        for samples in zero.values():
            assert set(samples) == set(get_args(ZeroWork))
            assert all(len(found) >= 1 for found in samples.values())


@pytest.mark.slow
def test_gathering_and_reducing_grow_with_the_bytes(timed):
    """E: both copy; hooks take time without. Slow: a busy machine hides the copies."""
    for zero, _ in timed:
        for work in ("zero_gather", "zero_reduce"):
            assert median(zero["large"][work]) > 2 * median(zero["small"][work])
        assert max(zero["small"]["zero_forward"]) > 5e-6


def test_waits_come_with_the_compute_before_them(timed):
    for _, waits in timed:
        lengths = [compute_s for compute_s, _, _ in waits]
        assert lengths == sorted(lengths)
        assert all(compute_s > 0 for compute_s in lengths)


def test_only_blocks_work_has_a_time_of_its_own_for_each_call():
    """E: exact samples give back what they were made of, at the undisturbed pace."""
    shapes = ((1, 2**10), (16, 2**10), (1, 2**19), (16, 2**15))
    samples = [
        StepSample(
            work=work,
            num_tensors=count,
            numel=numel,
            # The machine was slower by as much as its pace says, at every visit by another.
            visits=tuple(
                slower * (call + 3e-6 * count + 1e-10 * 4 * count * numel)
                for slower in (1.0, 1.3, 2.0)
            ),
            paces=(1e-4, 1.3e-4, 2e-4),
        )
        for work, call in (("adamw", 0.0), ("zero_gather", 2e-4))
        for count, numel in shapes
    ]
    for fit in _step_fits(samples, 1e-4):
        assert fit.s_per_call == pytest.approx(2e-4 if fit.work == "zero_gather" else 0.0, abs=1e-9)
        assert fit.s_per_tensor == pytest.approx(3e-6, rel=1e-3)
        assert fit.s_per_byte == pytest.approx(1e-10, rel=1e-3)


def test_waits_are_a_line_in_the_compute():
    """E: a short wait that comes out below nothing by noise does not hide the long ones."""
    waits = [(0.5e-3, -50e-6, 1e-4), (2e-3, 200e-6, 2e-4), (8e-3, 800e-6, 9e-4)]
    # Four rounds, of which one was disturbed.
    fit = _wait_fit([waits, waits, waits, [(c, 9 * w, 9 * i) for c, w, i in waits]])
    assert fit is not None
    assert fit.s_per_redistribution == pytest.approx(2e-4)
    assert fit.least_compute_s == 0.5e-3
    assert fit.s_per_compute_s == pytest.approx(0.1, rel=0.05)
    assert _wait_fit(()) is None
