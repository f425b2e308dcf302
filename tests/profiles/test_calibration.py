"""Factors learned from recorded runs: what is found, what is not believed, and what is stored."""

import random

import pytest
from pydantic import ValidationError

from profiles import load_profile, save_profile
from profiles.calibration import DRIFT, Factors, add_run, calibrate, op_term
from profiles.records import Calibration, CalibrationRun, Factor, Group, Observation, OpQuery

TRUE = {"product forward": 1.4, "product backward": 0.8, "adamw": 2.0}


def observed(what: str, parts: dict[str, float], *, times: float = 1.0, error: float = 0.0):
    """An observation that took what the true factors say, and `times` that."""
    return Observation(
        what=what,
        measured_s=times * sum(TRUE[term] * seconds for term, seconds in parts.items()),
        standard_error=error,
        predicted_s=sum(parts.values()),
        parts_s=parts,
    )


def run_of(*observations: Observation, recording: str = "a") -> CalibrationRun:
    return CalibrationRun(
        plan="p", model="gpt", num_steps=5, recording=recording, observations=observations
    )


def a_run(seed: int, *, times: float = 1.0) -> CalibrationRun:
    """Jobs of four stages with noise of 2%, an optimizer and a step."""
    chance = random.Random(seed)
    found = []
    for stage in range(4):
        size = chance.uniform(0.5, 2.0)
        for parts in ({"product forward": size}, {"product backward": 2 * size}):
            noise = chance.gauss(1.0, 0.02) * times
            found.append(observed(f"{stage}{parts}", parts, times=noise, error=0.02))
    found.append(observed("optimizer", {"adamw": 0.3}, times=times))
    step = {"product forward": 4.0, "product backward": 8.0, "adamw": 0.3}
    return run_of(*found, observed("step", step, times=times), recording=str(seed))


def test_the_factors_are_found():
    found = calibrate([a_run(1)])
    for term, factor in TRUE.items():
        # One run of a machine that may have been DRIFT slower than usual says no more.
        assert found.factors[term].value == pytest.approx(factor, rel=1.5 * DRIFT)
    assert found.error_before > 0.2
    assert found.error_after < 0.05


def test_runs_add_up_and_do_not_multiply():
    """A second run of the same machine leaves the factors where they were, and is surer of them."""
    first = add_run(None, a_run(1))
    both = add_run(first, a_run(2))
    for term, factor in TRUE.items():
        assert both.factors[term].value == pytest.approx(factor, rel=DRIFT)
        assert both.factors[term].sigma < first.factors[term].sigma
    assert len(both.runs) == 2


def test_a_run_counts_once():
    first = add_run(None, a_run(1))
    assert add_run(first, a_run(1)) == first


def test_a_machine_that_drifts_is_told_from_a_profile_that_is_wrong():
    """Runs at 0.9 and 1.1 of the usual speed: the factors are those of the usual speed."""
    both = calibrate([a_run(1, times=1.1), a_run(2, times=0.9)])
    for term, factor in TRUE.items():
        assert both.factors[term].value == pytest.approx(factor, rel=DRIFT)


def test_noise_is_not_believed():
    """Of a time that varies by as much as it is off, little is taken; of a steady one, most."""
    parts = {"product forward": 1.0}
    noisy, steady = (
        calibrate([run_of(observed("F", parts, error=error))]).factors["product forward"]
        for error in (1.0, 0.0)
    )
    assert 1.0 < noisy.value < 1.1
    assert steady.value > 1.3
    assert noisy.sigma > 3 * steady.sigma


def test_one_disturbed_time_is_not_learned():
    found = [observed(f"F{i}", {"product forward": 1.0}) for i in range(6)]
    found.append(observed("F6", {"product forward": 1.0}, times=4.0))
    factor = calibrate([run_of(*found)]).factors["product forward"]
    assert factor.value == pytest.approx(TRUE["product forward"], abs=0.05)


def factors(**values: float) -> Calibration:
    return Calibration(
        factors={term: Factor(value=value, sigma=0.1) for term, value in values.items()},
        error_before=0.2,
        error_after=0.1,
        runs=(a_run(1),),
    )


def test_every_answer_has_its_factor(tmp_path):
    """Ops by kind and direction, collectives by kind and group, work beside blocks, launches."""
    plain = load_profile("h100-sxm5-80gb")
    pair, four = Group(ranks_per_node=2), Group(ranks_per_node=4)
    known = factors(**{"product forward": 2.0, "all_reduce 2x1": 3.0, "adamw": 5.0, "launch": 7.0})
    file = plain.file.model_copy(update={"calibration": known})
    save_profile(type(plain)(file, plain.ops, plain.collectives), tmp_path / "mine")
    mine = load_profile(tmp_path / "mine")
    assert mine.file.calibration == known

    def matmul(profile, direction):
        query = OpQuery(
            target="aten.mm.default", shapes=((512, 512), (512, 512)), dtype="bfloat16",
            direction=direction, flop=2.0 * 512**3, num_bytes=3 * 2 * 512**2,
        )  # fmt: skip
        return profile.op_seconds(query).seconds

    def update(profile):
        return profile.step_seconds("adamw", num_bytes=1e6).seconds

    assert matmul(mine, "forward") == pytest.approx(2 * matmul(plain, "forward"))
    assert matmul(mine, "backward") == matmul(plain, "backward")
    for group, factor in ((pair, 3.0), (four, 1.0)):
        assert mine.collective_seconds("all_reduce", 1e6, group).seconds == pytest.approx(
            factor * plain.collective_seconds("all_reduce", 1e6, group).seconds
        )
        least = plain.least_collective_s_per_byte("all_reduce", group, most_bytes=1e9)
        assert mine.least_collective_s_per_byte(
            "all_reduce", group, most_bytes=1e9
        ) == pytest.approx(factor * least)
    assert update(mine) == pytest.approx(5 * update(plain))
    assert mine.launch_overhead_s == pytest.approx(7 * plain.launch_overhead_s)
    assert op_term("product", "forward") in mine.factors.asked


def test_a_factor_is_a_positive_number():
    assert Factors({})["anything"] == 1.0
    with pytest.raises(ValidationError, match="greater than 0"):
        Factor(value=0.0, sigma=0.1)
