"""One number out of several visits: drift is taken out, disturbed visits do not count (M16)."""

import random

import numpy as np
import pytest

from profiles import Profile, load_profile, measure_profile
from profiles.lookup.families import pace_kind
from profiles.lookup.op_model import query_of
from profiles.measure import measure as measuring
from profiles.measure.visits import at_pace, midmean, over_ranks, undisturbed_pace
from tests.profiles.fake_workers import FakeWorkers
from tests.profiles.probes import a_few_probes, few_collectives


@pytest.mark.parametrize(
    ("values", "middle"),
    [((3.0,), 3.0), ((1.0, 2.0, 6.0), 3.0), ((9.0, 1.0, 2.0, 4.0), 3.0), ((1, 2, 3, 4, 99), 3.0)],
)
def test_the_midmean_leaves_out_a_quarter_at_each_end(values, middle):
    assert midmean(values) == middle


def test_visits_are_scaled_to_the_undisturbed_pace():
    """A visit at half the pace took twice as long as it would undisturbed."""
    assert at_pace((2.0, 4.0), (1e-4, 2e-4), 1e-4) == (2.0, 2.0)
    assert at_pace((2.0, 4.0), (), None) == (2.0, 4.0)
    assert undisturbed_pace(()) is None
    assert undisturbed_pace(np.linspace(1.0, 2.0, 101)) == pytest.approx(1.25)


def test_ranks_at_different_paces_count_alike():
    """10 s at pace 1 and 30 s at pace 3 are 10 paces each; their mean of 20 s has pace 2."""
    assert over_ranks((10.0, 30.0), (1.0, 3.0)) == (20.0, 2.0)
    assert over_ranks((10.0, 30.0), ()) == (20.0, None)


class Drifting(FakeWorkers):
    """A machine that others slow down, for a whole visit at a time."""

    slowed = (1.0, 1.0, 1.25, 1.5)

    def __init__(self, launcher):
        self._chance = random.Random(0)

    def call(self, task, *, timeout_s):
        answers = super().call(task, timeout_s=timeout_s)
        if task["task"] not in ("op", "step", "zero"):
            return answers
        factor = self._chance.choice(self.slowed)
        return [
            {name: [factor * s for s in samples] for name, samples in answer.items()}
            for answer in answers
        ]


def measured(monkeypatch, folder, workers) -> Profile:
    monkeypatch.setattr(measuring, "WorkerGroup", workers)
    monkeypatch.setattr(measuring, "standard_grid", a_few_probes)
    monkeypatch.setattr(measuring, "collective_probes", few_collectives)
    return measure_profile(folder, nproc=2)


def test_a_machine_that_drifts_gives_the_records_of_one_that_does_not(monkeypatch, tmp_path):
    """Records are of the undisturbed machine; answers are as slow as it typically was."""
    steady = measured(monkeypatch, tmp_path / "steady", FakeWorkers)
    drifting = measured(monkeypatch, tmp_path / "drifting", Drifting)
    for calm, other in zip(steady.ops, drifting.ops, strict=True):
        assert other.seconds == pytest.approx(calm.seconds, rel=1e-3)
    assert (
        sum(
            calm.visits != other.visits
            for calm, other in zip(steady.ops, drifting.ops, strict=True)
        )
        > 10
    )
    slowdowns = load_profile(tmp_path / "drifting").file.typical_slowdown
    assert set(slowdowns) == {"product", "light"}
    query = query_of(steady.ops[-1])
    slowdown = slowdowns[pace_kind(query.target)]
    # The middle half of as many 1, 1, 1.25 and 1.5.
    assert slowdown.value == pytest.approx((1.0 + 1.25) / 2, rel=0.1)
    assert (slowdown.low, slowdown.high) == (pytest.approx(1.0), pytest.approx(1.5))
    answers = [profile.op_seconds(query).seconds for profile in (steady, drifting)]
    assert answers[1] / answers[0] == pytest.approx(slowdown.value, rel=1e-3)
    for calm, other in zip(steady.file.step_fits, drifting.file.step_fits, strict=True):
        assert other.s_per_tensor == pytest.approx(calm.s_per_tensor, rel=1e-3)
        answers = [
            profile.step_seconds(calm.work, num_bytes=4e6).seconds for profile in (steady, drifting)
        ]
        assert answers[1] / answers[0] == pytest.approx(slowdowns["light"].value, rel=1e-3)


def test_work_that_took_no_time_has_the_mean_pace_of_its_ranks():
    """A difference of two times is 0 where a busy machine swallowed it: on all ranks, at times."""
    assert over_ranks((0.0, 0.0), (1.0, 3.0)) == (0.0, 2.0)
