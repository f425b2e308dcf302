"""Issue 19, point 4: goodput under failures, beside a simulation of failures one by one."""

from __future__ import annotations

from dataclasses import fields
from math import inf, sqrt

import numpy as np
import pytest

from costmodel.failures import (
    Failures,
    Goodput,
    best_interval_s,
    goodput,
)
from planner.errors import PlanError
from planner.units import DAY_S


def young_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Young's interval, sqrt(2 d M)."""
    return sqrt(2 * checkpoint_s * mtbf_s)


def played(
    failures: Failures, num_nodes: int, interval_s: float, *, segments: int, seed: int
) -> dict[str, float]:
    """The parts of the time of a job that is played failure by failure: work, a checkpoint, and at
    each failure back to the last one. Slow spells begin at random on each node and overlap.
    """
    rng = np.random.default_rng(seed)
    mtbf_s = failures.node_mtbf_s / num_nodes
    spells = _Spells(failures, num_nodes, rng)
    now, next_failure = 0.0, rng.exponential(mtbf_s)
    spent = dict.fromkeys(("useful", "checkpoints", "lost", "restarting", "slow"), 0.0)
    for _ in range(segments):
        while True:
            # Time at which so much has been done: work takes longer while a node is slow.
            worked_s, slow_s = spells.work(now, interval_s)
            end = now + worked_s + failures.checkpoint_s
            if end <= next_failure:
                spent["useful"] += worked_s - slow_s
                spent["slow"] += slow_s
                spent["checkpoints"] += failures.checkpoint_s
                now = end
                break
            spent["lost"] += next_failure - now
            now = next_failure
            while True:
                next_failure = now + rng.exponential(mtbf_s)
                if next_failure > now + failures.restart_s:
                    spent["restarting"] += failures.restart_s
                    now += failures.restart_s
                    break
                spent["restarting"] += next_failure - now
                now = next_failure
    return {name: seconds / now for name, seconds in spent.items()}


class _Spells:
    """Times in which at least one node is slow, drawn as they are met."""

    def __init__(self, failures: Failures, num_nodes: int, rng: np.random.Generator) -> None:
        self._rng, self._failures = rng, failures
        self._every_s = failures.slow_mtbf_s / num_nodes
        # A queue that has run for long: as many spells are there as come during one.
        waiting = rng.poisson(failures.slow_s / self._every_s) if self._every_s < inf else 0
        ends = rng.exponential(failures.slow_s, waiting) if waiting else [0.0]
        self._until = float(max(ends))
        self._next = rng.exponential(self._every_s) if self._every_s < inf else inf

    def work(self, start: float, work_s: float) -> tuple[float, float]:
        """Seconds that so much work takes from `start`, and those beyond the work itself."""
        now, left, slow = start, work_s, 0.0
        while True:
            while self._next <= now:
                self._until = max(
                    self._until, self._next + self._rng.exponential(self._failures.slow_s)
                )
                self._next += self._rng.exponential(self._every_s)
            if now < self._until:
                span = min(self._until, self._next) - now
                done = span / self._failures.slow_factor
                if done >= left:
                    taken = left * self._failures.slow_factor
                    return now + taken - start, slow + taken - left
                now, left, slow = now + span, left - done, slow + span - done
            else:
                span = self._next - now
                if span >= left:
                    return now + left - start, slow
                now, left = now + span, left - span


def parts(found: Goodput) -> dict[str, float]:
    return {f.name: getattr(found, f.name) for f in fields(found) if not f.name.endswith("_s")}


@pytest.mark.parametrize("num_nodes", [16, 2048, 12_500])
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_as_played_failure_by_failure(num_nodes, factor):
    """Six failures in a thousand node-days; checkpoints of 20 s, restarts of 6 minutes."""
    failures = Failures(node_mtbf_s=1000 / 6 * DAY_S, checkpoint_s=20.0, restart_s=360.0)
    best = goodput(failures, num_nodes).interval_s
    found = goodput(failures, num_nodes, interval_s=factor * best)
    expected = played(failures, num_nodes, factor * best, segments=40_000, seed=num_nodes)
    assert sum(parts(found).values()) == pytest.approx(1.0)
    for name, part in parts(found).items():
        assert part == pytest.approx(expected[name], abs=0.006), name


def test_slow_nodes_as_played():
    """2,048 nodes with a spell a year of 3 hours each: some node is slow half of the time."""
    failures = Failures(
        node_mtbf_s=300 * DAY_S,
        checkpoint_s=20.0,
        restart_s=300.0,
        slow_mtbf_s=365 * DAY_S,
        slow_s=3 * 3600.0,
        slow_factor=1.4,
    )
    found = goodput(failures, 2048)
    assert 0.4 < 1 - np.exp(-2048 * 3 / (365 * 24)) < 0.6
    # Intervals of work grow while a node is slow, which the formula counts as seconds of work.
    expected = played(failures, 2048, found.interval_s, segments=60_000, seed=3)
    for name, part in parts(found).items():
        assert part == pytest.approx(expected[name], abs=0.015), name


@pytest.mark.parametrize("checkpoint_s", [0.1, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf_s", [600.0, 7200.0, 1e6])
def test_no_interval_is_better_than_the_best(checkpoint_s, mtbf_s):
    failures = Failures(node_mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=30.0)
    best = goodput(failures, 1)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other = goodput(failures, 1, interval_s=factor * best.interval_s)
        assert other.useful <= best.useful * (1 + 1e-12)


def test_young_and_daly():
    """Young's square root where checkpoints are short; Daly's series (2006, equation 37) further:
    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18 M) - d.
    """
    assert best_interval_s(1e6, 1.0) == pytest.approx(young_interval_s(1e6, 1.0), rel=1e-3)
    for checkpoint_s in (60.0, 300.0, 900.0):
        ratio = checkpoint_s / 7200.0
        series = 1 + sqrt(ratio / 2) / 3 + ratio / 18
        daly = young_interval_s(7200.0, checkpoint_s) * series - checkpoint_s
        assert best_interval_s(7200.0, checkpoint_s) == pytest.approx(daly, rel=2e-3)


def test_llama_3s_run():
    """419 unexpected interruptions in 54 days on 2,048 nodes, and more than 90% of the time spent
    on training (arXiv 2407.21783, section 3.3.4): so it is with checkpoints that stall for seconds
    and restarts of ten minutes.
    """
    failures = Failures(node_mtbf_s=2048 * 54 * DAY_S / 419, checkpoint_s=5.0, restart_s=600.0)
    found = goodput(failures, 2048)
    assert found.mtbf_s == pytest.approx(3.09 * 3600, rel=0.01)
    assert 0.90 < found.useful < 0.95


def test_hopeless_intervals_are_no_error():
    failures = Failures(node_mtbf_s=1.0, checkpoint_s=1.0, restart_s=1e4)
    found = goodput(failures, 1000, interval_s=1e5)
    assert found.useful == 0
    assert found.restarting == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_mtbf_s": 0.0}, "node_mtbf_s is 0; it must be above 0"),
        ({"checkpoint_s": -1.0}, "checkpoint_s is -1; it must be above 0"),
        ({"slow_factor": 0.5}, "the factor 1 or more"),
    ],
)
def test_times_that_cannot_be(change, message):
    usual = {"node_mtbf_s": 1e6, "checkpoint_s": 10.0, "restart_s": 60.0}
    with pytest.raises(PlanError, match=message):
        Failures(**(usual | change))
