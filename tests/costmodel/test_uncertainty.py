"""How wide an estimate's interval is, and what makes it wider."""

from dataclasses import replace
from math import exp, sqrt

import pytest
from scipy.stats import t as student

from costmodel import estimate
from costmodel.execution import execution as execution_records
from costmodel.execution import find_execution
from costmodel.execution.execution import memory_residuals
from costmodel.memory.parts import MemoryParts, with_overheads
from costmodel.uncertainty import (
    Interval,
    memory_interval,
    needed_limit_bytes,
    odds_of_fit,
    run_kind,
    runtime_interval,
    sigma_of,
    step_interval,
    step_sigma,
    usable_bytes,
)
from planner.language.lowering.defaults import default_plan
from planner.language.templates import Adapters, Experts, Transformer, build_transformer
from profiles import Profile, load_profile
from profiles.records import Calibration, CalibrationRun
from tests.captures import capture_tiny


@pytest.fixture(scope="module")
def gpt():
    return capture_tiny("gpt")


@pytest.fixture(scope="module")
def h100():
    return load_profile("h100-sxm5-80gb")


def changed(profile: Profile, **fields) -> Profile:
    file = profile.file.model_copy(update=fields)
    return Profile(file, profile.ops, profile.collectives)


def test_a_shipped_profile_is_as_sure_as_its_published_runs(gpt, h100):
    """Residuals of its sources, mean of squares 0.00183: sigma 1.25 * 0.0427; 1.28 of it each way.

    No answer of a pipeline's plan is worse than that.
    """
    sigma, basis = step_sigma(h100)
    assert sigma == pytest.approx(0.0534, abs=0.0005)
    assert basis == "published runs of 8 sources"
    plan = default_plan(gpt, pp=2, microbatch_size=2, num_microbatches=2)
    found, step_s = step_interval(gpt, h100, plan), estimate(gpt, h100, plan).step_s
    assert found.high_s >= step_s * exp(1.28 * sigma)
    assert sqrt(found.low_s * found.high_s) == pytest.approx(step_s)
    assert found.holds(step_s)
    assert not found.holds(1.01 * found.high_s)
    fused = find_execution("ours-compiled")
    found = step_interval(gpt, h100, plan, fused)
    fused_s = estimate(gpt, h100, plan, execution=fused).step_s
    assert sqrt(found.low_s * found.high_s) == pytest.approx(fused_s)
    assert fused_s < step_s


def test_answers_that_extrapolate_widen_it(gpt, h100):
    """Ops that are half their time off make a step that much less sure; no host is waited for."""
    plan = default_plan(gpt, pp=2, microbatch_size=2, num_microbatches=2)
    no_host = h100.file.launch_overhead_s.model_copy(update={"value": 0.0})

    def width(error: float) -> Interval:
        fits = [fit.model_copy(update={"relative_error": error}) for fit in h100.file.op_fits]
        profile = changed(h100, launch_overhead_s=no_host, op_fits=tuple(fits))
        return step_interval(gpt, profile, plan)

    assert width(0.5).relative > 1.5 * width(0.0).relative
    assert "own answers" in width(0.5).basis


def test_recorded_runs_say_how_sure_a_calibrated_profile_is(h100):
    """Median error 4%: hypot(0.0592, 0.05) = 0.0775; of one run sqrt(2) of it, of four less."""

    def after(runs: int) -> float:
        told = (CalibrationRun.model_construct(expert_imbalance=None),) * runs
        known = Calibration.model_construct(factors={}, error_after=0.04, runs=told)
        return step_sigma(changed(h100, calibration=known))[0]

    assert after(1) == pytest.approx(0.0775 * sqrt(2), rel=0.01)
    assert after(4) == pytest.approx(0.0775 * sqrt(1.25), rel=0.01)


def test_a_device_without_published_runs_is_least_sure(h100):
    unknown = changed(h100, name="no-such-device")
    assert step_sigma(unknown) == (0.3, "no published runs of this device")


def residuals(monkeypatch: pytest.MonkeyPatch, **records: dict) -> None:
    """Make the records of runtimes these; each extends "base", but that."""
    found = {
        name: {"residuals": known, "extends": None if name == "base" else "base"}
        for name, known in records.items()
    }
    monkeypatch.setattr(execution_records, "read_record", found.__getitem__)


def test_a_runtime_is_as_sure_as_its_own_published_runs(monkeypatch):
    """Mean errors of 3% and 4%: sigma 1.25 * 0.0354, and of two sources sqrt(1.5) of it.

    Without runs of its own a runtime has those of what it extends, and without any of that kind a
    usual value.
    """
    errors = {"dense": {"a": 0.03, "b": 0.04}}
    residuals(
        monkeypatch, base=errors | {"experts": {"a": 0.2}}, own={"dense": {"c": 0.08}}, bare={}
    )

    def sigma(name: str, kind: str, **options) -> float:
        return sigma_of(execution_records.residuals_of_runs(name, kind, **options))

    assert sigma("base", "dense") == pytest.approx(1.25 * 0.0354 * sqrt(1.5), rel=0.01)
    assert sigma("own", "dense") == pytest.approx(1.25 * 0.08 * sqrt(2))
    assert (
        sigma("own", "dense", leave_out={"c"}) == sigma("bare", "dense") == sigma("base", "dense")
    )
    assert sigma("own", "experts") == pytest.approx(1.25 * 0.2 * sqrt(2))
    assert sigma("own", "adapters") == 0.3


def test_the_interval_of_a_runtime_is_of_the_model_s_kind(monkeypatch):
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn_hidden": 128}
    model = Transformer(**sizes, vocab=100, seq_len=8)
    kinds = {
        "dense": model,
        "experts": replace(model, experts=Experts(number=4, per_token=2, width=32)),
        "adapters": replace(model, adapters=Adapters(rank=4)),
    }
    errors = {"dense": 0.04, "experts": 0.16, "adapters": 0.08}
    known = {kind: {"a": error} for kind, error in errors.items()}
    runtime = replace(find_execution("megatron-core"), name="toy")
    residuals(monkeypatch, base=known, toy={})
    for kind, of_kind in kinds.items():
        graph = build_transformer(of_kind)
        assert run_kind(graph) == kind
        found = runtime_interval(graph, runtime, 2.0)
        assert found.high_s == pytest.approx(2 * exp(1.2816 * 1.25 * sqrt(2) * errors[kind]))
        assert sqrt(found.low_s * found.high_s) == pytest.approx(2)
        assert found.basis == "published runs of 1 source"


def test_the_width_is_relative_to_the_middle():
    assert Interval(low_s=0.9, high_s=1.1, basis="").relative == pytest.approx(0.1)


def test_memory_lies_between_what_tensors_and_the_allocator_may_be(h100):
    """By hand: sigma 1.25 * 0.01 * sqrt(2), the allocator holds 2.9% to 7.8% above its 5%."""
    parts = with_overheads(MemoryParts(parameter_bytes=10**9), h100)
    found = memory_interval(parts, h100, find_execution("ours-eager"))
    context = parts.context_bytes
    tensors = exp(1.2816 * 1.25 * 0.01 * sqrt(2)) - 1
    more = sqrt(tensors**2 + (0.028 / 1.05) ** 2)
    assert found.high_bytes == pytest.approx(1.05e9 * (1 + more) + context, abs=2)
    assert found.low_bytes < parts.total < found.high_bytes
    assert found.holds(parts.total)
    assert not found.holds(found.high_bytes + 1)
    assert found.basis == "dry runs on fake tensors; the allocator's share as in 26 published runs"


def test_memory_of_a_runtime_is_as_sure_as_its_published_runs(h100):
    parts = with_overheads(MemoryParts(parameter_bytes=10**9), h100)
    widths = {
        name: memory_interval(parts, h100, find_execution(name))
        for name in ("ours-compiled", "megatron-core", "megatron-classic", "eager-flash")
    }
    highest = [found.high_bytes for found in widths.values()]
    assert highest == sorted(set(highest))
    assert widths["megatron-core"].basis.startswith(
        "published runs (megatron_goldens, simumax_b200)"
    )
    assert widths["eager-flash"].basis.startswith("published runs (torchtitan_202412)")


def test_an_allocator_that_was_measured_is_as_wide_as_measured(h100):
    """The context is measured or assumed: no part of the width."""
    file = h100.file
    figure = file.allocator_overhead_fraction.model_copy(
        update={"value": 0.2, "low": 0.2, "high": 0.5}
    )
    measured = changed(h100, allocator_overhead_fraction=figure)
    parts = with_overheads(MemoryParts(parameter_bytes=10**9), measured)
    found = memory_interval(parts, measured, find_execution("ours-eager"))
    assert found.high_bytes > 1.5e9 + parts.context_bytes
    assert found.low_bytes > 0.97 * parts.total
    assert found.basis.endswith("as measured")


@pytest.mark.parametrize("odds", [0.5, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("runtime", ["ours-eager", "torchtitan"])
def test_an_estimate_of_all_that_is_usable_fits_with_the_odds_it_was_asked_for(h100, odds, runtime):
    execution = find_execution(runtime)
    usable = usable_bytes(h100.memory_bytes, h100, execution, odds)
    tensors = (usable - h100.context_bytes) / (1 + h100.allocator_overhead_fraction)
    parts = with_overheads(MemoryParts(activation_bytes=tensors), h100)
    assert float(parts.total) == pytest.approx(usable)
    assert odds_of_fit(parts, h100, execution, h100.memory_bytes) == pytest.approx(odds, abs=1e-4)


def test_even_odds_use_the_whole_limit_and_nine_of_ten_the_interval(h100):
    execution = find_execution("ours-eager")
    assert usable_bytes(2**36, h100, execution, 0.5) == 2**36
    parts = with_overheads(MemoryParts(activation_bytes=2**35), h100)
    high = memory_interval(parts, h100, execution).high_bytes
    assert odds_of_fit(parts, h100, execution, high) == pytest.approx(0.9, abs=1e-4)


def test_what_is_not_known_well_leaves_more_memory_free(h100):
    usable = [
        usable_bytes(h100.memory_bytes, h100, find_execution(name), 0.9)
        for name in ("ours-eager", "torchtitan")
    ]
    assert usable[1] < 0.9 * usable[0] < h100.memory_bytes


@pytest.mark.parametrize("execution", ["ours-eager", "nanotron", "megatron-core"])
@pytest.mark.parametrize("odds", [0.5, 0.9])
def test_the_limit_that_an_estimate_needs_leaves_it_just_so_much(execution, odds):
    h100, runtime = load_profile("h100-sxm5-80gb"), find_execution(execution)
    needed = needed_limit_bytes(2.0**36, h100, runtime, odds)
    assert usable_bytes(needed, h100, runtime, odds) == pytest.approx(2.0**36, rel=1e-12)


@pytest.mark.parametrize("odds", [0.6, 0.9, 0.975, 0.999])
def test_memory_has_the_tails_of_students_t(h100, odds):
    """With 3 degrees of freedom, so scaled that a tenth lies beyond 1.28 sigmas; the allocator's
    share is as measured.
    """
    figure = h100.file.allocator_overhead_fraction
    figure = figure.model_copy(update={"low": figure.value, "high": figure.value})
    measured = changed(h100, allocator_overhead_fraction=figure)
    runtime = find_execution("torchtitan-compiled")
    sigma = sigma_of(memory_residuals(runtime.name))
    room = measured.memory_bytes - measured.context_bytes
    usable = usable_bytes(measured.memory_bytes, measured, runtime, odds)
    sigmas = student.ppf(odds, 3) / student.ppf(0.9, 3) * 1.2816
    assert room / (usable - measured.context_bytes) == pytest.approx(exp(sigmas * sigma), rel=1e-4)


def test_runs_that_crashed_tell_how_sure_memory_is(h100):
    """nanotron's reserve 1.25 times their live tensors, of which 5% is the device's own figure."""
    parts = with_overheads(MemoryParts(parameter_bytes=10**9), h100)
    found = memory_interval(parts, h100, find_execution("nanotron"))
    held, more = 1.25e9, 0.028 / 1.05
    expected = held * (1 + sqrt((exp(1.2816 * 0.134) - 1) ** 2 + more**2))
    assert found.high_bytes - parts.context_bytes == pytest.approx(expected, rel=1e-6)
