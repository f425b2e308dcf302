"""B17: what logs of another stack's runs say of the next: factors on rates, and the interval."""

from math import log

import pytest

from benchmarks.published import PUBLISHED
from benchmarks.published.calibrated_groups import PricedRun, figures, left_out, priced
from costmodel.execution import find_execution
from costmodel.execution.executed import executed
from costmodel.runtime_calibration import (
    STEP,
    drift_of,
    growth,
    next_run,
    priors_of,
    told_runs,
    with_runs,
    without_runs,
)
from costmodel.table.kernels import HOST, KERNELS, LINKS, NETWORK, TERMS, WAITS, load_rates
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import price_row
from costmodel.uncertainty import WITHIN_SOURCE, memory_interval, usable_bytes
from profiles import load_profile
from profiles.calibration import calibrate, next_sigma
from profiles.records import CalibrationRun, Evidence, Observation

H100 = "h100-sxm5-80gb"
RUNTIME = "megatron-core"
SHARES = {KERNELS: 0.75, LINKS: 0.15, HOST: 0.05, WAITS: 0.05}
"""Parts of a step."""


def run(times: float, name: str, *, memory: float | None = None) -> CalibrationRun:
    """A run whose step took so many times what is predicted."""
    step = Observation(
        what=STEP, measured_s=times, standard_error=0.0, predicted_s=1.0, parts_s=SHARES
    )
    return CalibrationRun(
        plan="p",
        model="m",
        num_steps=10,
        recording=name,
        observations=(step,),
        memory_ratio=memory,
        drift=drift_of(RUNTIME, "dense"),
        evidence=(Evidence(file="log", stack="Megatron-LM", digest=name, readings=10),),
    )


def sigma_after(*times: float) -> float:
    runs = [run(each, str(index)) for index, each in enumerate(times)]
    drift = drift_of(RUNTIME, "dense")
    return next_sigma(runs, SHARES, drift=drift, priors=priors_of(RUNTIME, runs))


def test_each_run_narrows_the_interval_of_the_next():
    """From what sources differ towards what runs of one differ."""
    before = drift_of(RUNTIME, "dense") / WITHIN_SOURCE
    widths = [sigma_after(*[1.05] * number) for number in (1, 2, 3)]
    assert before > widths[0] > widths[1] > widths[2] > drift_of(RUNTIME, "dense") * 0.7


def test_runs_that_scatter_widen_it():
    assert sigma_after(0.8, 1.25, 1.0) > 1.5 * sigma_after(1.0, 1.0, 1.0)


@pytest.mark.parametrize("times", [0.8, 1.1, 1.4, 3.0])
def test_what_all_runs_took_longer_is_learned(times):
    """Most of it, however far from what sources are usually off by."""
    runs = [run(times, str(index)) for index in range(3)]
    factors = calibrate(runs, priors_of(RUNTIME, runs)).factors
    step = 1.0 + sum(share * (factors[term].value - 1.0) for term, share in SHARES.items())
    assert abs(log(step / times)) < 0.4 * abs(log(times))
    # One run is believed less than three.
    alone = calibrate(runs[:1], priors_of(RUNTIME, runs[:1])).factors
    assert abs(log(alone[KERNELS].value)) < abs(log(factors[KERNELS].value))


def test_rates_slow_by_kind_of_work_and_stay_below_peaks():
    rates = load_rates(load_profile(H100))
    slow = rates.slowed({KERNELS: 2.0, LINKS: 4.0, HOST: 3.0})
    assert slow.matmul_efficiency == rates.matmul_efficiency / 2
    assert slow.kernel_s == 2 * rates.kernel_s
    assert slow.link_efficiency == rates.link_efficiency / 4
    assert slow.network_efficiency == rates.network_efficiency
    assert slow.host_op_s == 3 * rates.host_op_s
    assert rates.slowed({KERNELS: 0.2}).matmul_efficiency == 1.0
    assert rates.slowed({}) is rates


ROW = {
    "stack": RUNTIME, "gpu": "H100", "gpus": "16", "layers": "8", "hidden": "2048", "heads": "16",
    "seq_len": "2048", "tp": "2", "pp": "2", "micro_batch": "1", "global_batch": "32",
    "vocab": "32000",
}  # fmt: skip


def test_what_a_step_grows_by_adds_up_to_it_and_factors_reach_prices():
    prices = RowPrices()
    plain = price_row(ROW, prices)
    plan, costs = prices.plan(plain.run, plain.profile, plain.rates)
    grown = growth(plan, costs)
    assert set(grown) == set(TERMS)
    assert sum(grown.values()) == pytest.approx(plain.estimate.step_s, rel=0.1)
    assert grown[KERNELS] > grown[NETWORK] > 0
    # A profile that learned prices the runtime with its factors, and no other.
    taught = with_runs(load_profile(H100), {RUNTIME: [run(1.2, "a"), run(1.2, "b")]})
    known = taught.file.runtime_calibrations[RUNTIME]
    again = price_row(ROW, prices, taught)
    first_order = sum(grown[term] * (known.factors[term].value - 1) for term in SHARES)
    assert again.estimate.step_s == pytest.approx(plain.estimate.step_s + first_order, rel=0.01)
    other = price_row({**ROW, "stack": "nanotron"}, prices, taught)
    assert other.estimate.step_s == price_row({**ROW, "stack": "nanotron"}).estimate.step_s
    assert price_row(ROW, prices, without_runs(taught)).estimate.step_s == plain.estimate.step_s
    # Searches and estimates have the same rates.
    in_search = executed(taught, find_execution(RUNTIME), 16)
    assert in_search.rates == again.rates
    before, after = next_run(RUNTIME, known)
    assert after < before
    assert told_runs(known) == "2 runs of Megatron-LM"


def test_memory_that_runs_held_moves_the_interval_and_what_is_usable():
    """Of runs that held a fifth more than estimated, a plan may take less."""
    profile, execution = load_profile(H100), find_execution(RUNTIME)
    runs = [run(1.0, str(index), memory=1.2) for index in range(3)]
    taught = with_runs(profile, {RUNTIME: runs})
    parts = max(price_row(ROW).estimate.memory, key=lambda each: float(each.total))
    plain, moved = (memory_interval(parts, each, execution) for each in (profile, taught))
    assert moved.low_bytes > plain.low_bytes
    assert moved.high_bytes / moved.low_bytes < plain.high_bytes / plain.low_bytes
    assert moved.basis.startswith("3 logs of its own runs and ")
    usable = [usable_bytes(8e10, each, execution, 0.5) for each in (profile, taught)]
    assert usable[0] > usable[1] > usable[0] / 1.2


def published(times: float, row: int) -> PricedRun:
    return PricedRun(
        table="t", row=row, source="s", gpu="H100", runtime=RUNTIME, kind="dense",
        measured_s=times, predicted_s=1.0, grown_s=SHARES,
    )  # fmt: skip


def test_a_group_that_is_off_alike_is_predicted_better_with_a_narrower_interval():
    told = left_out([published(each, row) for row, each in enumerate((1.2, 1.18, 1.21, 1.19))], 3)
    found = figures(told)
    assert found["error_after_pct"] < 0.4 * found["error_before_pct"]
    assert found["interval_after_pct"] < found["interval_before_pct"]
    assert (found["held_before_pct"], found["held_after_pct"]) == (0.0, 100.0)


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"needs the published tables in {PUBLISHED}")
def test_three_runs_of_a_published_group_narrow_the_fourth():
    """SimuMax's runs on B200, each left out in turn (simumax_b200 of the published tables)."""
    runs = [r for r in priced(PUBLISHED, 4, ("simumax_b200",), None) if r.kind == "dense"]
    assert len(runs) == 4
    found = figures(left_out(runs, 3))
    assert found["interval_after_pct"] < found["interval_before_pct"]
    assert found["held_after_pct"] >= 75
    assert found["error_after_pct"] < found["error_before_pct"] + 1.0
