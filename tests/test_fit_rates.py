"""Rates of a device are fitted to runs, and found again where known rates made the runs."""

from dataclasses import replace

import pytest

from benchmarks.published.fit_rates import (
    RANGES,
    MeasuredRun,
    PricedRuns,
    fit_rates,
    held_out_errors,
)
from costmodel.table.kernels import FITTED, load_rates
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.run_row import parse_row
from planner.errors import ProfileError
from profiles import load_profile
from tests.costmodel.table.rows_of_runs import ROW

SMALL = {**ROW, "layers": "4", "global_batch": "8"}


@pytest.fixture(scope="module")
def machine():
    profile = load_profile("a100-sxm4-80gb")
    return profile, load_rates(profile)


def test_rates_are_found_again(machine):
    """A fit to runs that known rates made returns what those rates predict."""
    profile, rates = machine
    truth = replace(rates, matmul_efficiency=0.6, memory_efficiency=0.7, host_op_s=6e-5)
    changes = [
        {"micro_batch": b, "tp": tp, "pp": pp, "dp": str(8 // (tp * pp)), "hidden": str(h),
         "heads": str(h // 128), "ffn_hidden": str(4 * h)}
        for b, tp, pp, h in ((1, 1, 1, 2048), (4, 1, 1, 4096), (2, 2, 1, 4096), (1, 4, 2, 8192),
                             (8, 1, 2, 2048), (1, 1, 1, 1024))
    ]  # fmt: skip
    runs = []
    for change in changes:
        run = parse_row({**SMALL, **change})
        seconds = RowPrices().estimate(run, profile, truth).step_s
        runs.append(MeasuredRun(run=run, profile=profile, rates=rates, step_s=seconds))
    priced = PricedRuns(runs)
    values, told = fit_rates(priced, rounds=4, pull=0.0)
    assert abs(priced.relative_errors(values)).max() < 0.01
    assert "matmul_efficiency" in told
    assert "portable_attention_efficiency" not in told
    parts = ["one", "two"] * 3
    unseen = held_out_errors(priced, parts, start=values, pull=0.0)
    assert abs(unseen).max() < 0.05


def test_one_run_hardly_moves_a_rate(machine):
    """What few runs say weighs little against what other devices told; many runs have their way."""
    profile, rates = machine
    run = parse_row(SMALL)
    slow = 1.5 * RowPrices().estimate(run, profile, rates).step_s
    measured = MeasuredRun(run=run, profile=profile, rates=rates, step_s=slow)
    usual = {name: value for name, (_, value, _) in RANGES.items()}
    fitted = [usual, *(fit_rates(PricedRuns([measured] * count), rounds=4)[0] for count in (1, 6))]
    errors = [float(PricedRuns([measured]).relative_errors(values)[0]) for values in fitted]
    assert errors[0] < errors[1] < errors[2] < 0
    assert abs(errors[2]) < 0.05


def test_rates_that_are_held_stay(machine):
    """A run on a slower host, of which the host's rate alone may be told."""
    profile, rates = machine
    run = parse_row({**SMALL, "hidden": "512", "heads": "8", "ffn_hidden": "2048"})
    slow = RowPrices().estimate(run, profile, replace(rates, host_op_s=7.5e-5)).step_s
    priced = PricedRuns([MeasuredRun(run=run, profile=profile, rates=rates, step_s=slow)])
    start = {name: getattr(rates, name) for name in RANGES}
    values, told = fit_rates(priced, start=start, free=("host_op_s",), rounds=4, pull=0.0)
    assert told == ("host_op_s",)
    assert values["host_op_s"] == pytest.approx(7.5e-5, rel=0.02)
    assert {name: values[name] for name in RANGES if name not in told} == {
        name: value for name, value in start.items() if name not in told
    }


def test_other_rates_price_the_same_programs(machine, monkeypatch):
    """A row is lowered once, and under other rates it takes what it takes priced by itself."""
    profile, rates = machine
    run = parse_row({**ROW, "stack": "megatron-te"})
    step_s = RowPrices().estimate(run, profile, rates).step_s
    priced = PricedRuns([MeasuredRun(run=run, profile=profile, rates=rates, step_s=step_s)])
    assert priced.relative_errors()[0] == pytest.approx(0, abs=1e-12)
    slower = {"matmul_efficiency": 0.5, "exposed_part": 0.9, "memory_efficiency": 0.5}
    alone = RowPrices().estimate(run, profile, replace(rates, **slower)).step_s
    monkeypatch.setattr("costmodel.cache.lower", None)
    assert priced.relative_errors(slower)[0] == pytest.approx(alone / step_s - 1, rel=1e-9)
    assert alone > 1.05 * step_s


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm", "h200-sxm-141gb"])
def test_shipped_rates_are_physical(name):
    """Few, named, and within what the device can do."""
    rates = load_rates(load_profile(name))
    assert set(FITTED) == {*RANGES, "matmul_half_k"}
    for rate, (low, _, high) in RANGES.items():
        assert low <= getattr(rates, rate) <= high * 1.001, rate


def test_a_device_without_rates_says_so(machine):
    class Unknown:
        name = "abacus"

    with pytest.raises(ProfileError, match="abacus has no training"):
        load_rates(Unknown())
