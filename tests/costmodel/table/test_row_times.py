"""Parts of a row's step: each has the physics that it stands for."""

from dataclasses import replace

import pytest

from costmodel.table.kernels import DeviceRates, load_rates
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.row_stack import FSDP_FLASH, MEGATRON_CORE
from costmodel.table.rows.run_row import RunRow, parse_row
from profiles import Profile, load_profile
from tests.costmodel.table.rows_of_runs import MIXTRAL, ROW


def parts_of(run: RunRow, profile: Profile, rates: DeviceRates) -> dict[str, float]:
    return RowPrices().estimate(run, profile, rates).path.parts


def step_of(run: RunRow, profile: Profile, rates: DeviceRates) -> float:
    return RowPrices().estimate(run, profile, rates).step_s


@pytest.fixture(scope="module")
def machine():
    profile = load_profile("a100-sxm4-80gb")
    return profile, load_rates(profile)


def test_parts_are_not_negative_and_one_device_communicates_nothing(machine):
    alone = {**ROW, "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "global_batch": "8"}
    parts = parts_of(parse_row(alone), *machine)
    spread = parts_of(parse_row(ROW), *machine)
    assert not any(parts[name] for name in ("tp_comm_s", "dp_comm_s", "messages_s", "fill_drain_s"))
    assert min(spread.values()) >= 0


@pytest.mark.parametrize("column", ["layers", "ffn_hidden", "global_batch", "vocab"])
def test_more_of_anything_takes_longer(machine, column):
    """M16: monotone in each size."""
    more = {**ROW, column: str(2 * int(ROW[column]))}
    assert step_of(parse_row(more), *machine) > step_of(parse_row(ROW), *machine)


def test_pipeline_bubble_is_the_known_fraction(machine):
    """P4: (pp-1)/(m+pp-1) of the pipeline's time, for equal stages without transfers."""
    profile, rates = machine
    free = replace(rates, network_efficiency=1e12, link_efficiency=1e12)
    row = {**ROW, "tp": "1", "pp": "8", "dp": "1", "vocab": "1", "hidden": "8192",
           "heads": "64", "ffn_hidden": "32768"}  # fmt: skip
    parts = parts_of(parse_row(row), profile, free)
    piped = sum(parts[name] for name in ("compute_s", "host_s", "recompute_s", "fill_drain_s"))
    assert parts["fill_drain_s"] / piped == pytest.approx(7 / (16 + 7), rel=0.02)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_one_microbatch_goes_through_all_stages(machine, pp):
    """P4: with one microbatch, stages take as long one after the other as on one device, however
    unequal they are."""
    profile, rates = machine
    free = replace(rates, network_efficiency=1e12, link_efficiency=1e12)
    row = {**ROW, "tp": "1", "dp": "1", "gpus": "", "hidden": "8192", "heads": "64",
           "ffn_hidden": "32768", "vocab": "512000", "global_batch": "2"}  # fmt: skip

    def seconds(pp):
        run = parse_row({**row, "pp": str(pp)})
        return RowPrices().estimate(run, profile, free).timeline.makespan_s

    assert seconds(pp) == pytest.approx(seconds(1), rel=1e-3)


def test_rows_of_logits_that_are_not_aligned_are_slow(machine):
    """A vocabulary of 50257 has rows that start at any byte; tp pads it."""

    def extra(**changes):
        odd, padded = (
            parts_of(parse_row({**ROW, **changes, "vocab": vocab}), *machine)["compute_s"]
            for vocab in ("50257", "50304")
        )
        return odd / padded - 1

    assert extra(tp="1", pp="1", gpus="2") > 0.01
    assert abs(extra(pp="1", gpus="4")) < 0.001


def test_host_and_device_wait_for_each_other_where_both_are_as_slow(machine):
    """Far from that point, a phase takes what the slower of them takes."""
    profile, rates = machine
    row = {**ROW, "tp": "1", "pp": "1", "dp": "8", "hidden": "1024"}

    def step(**changes):
        changes |= {"host_backward_op_s": changes["host_op_s"] / 2}
        return step_of(parse_row(row), profile, replace(rates, **changes))

    idle, busy = step(host_op_s=1e-9), step(host_op_s=1e-3)
    assert step(host_op_s=2e-9) == pytest.approx(idle)
    assert step(host_op_s=2e-3) == pytest.approx(2 * busy, rel=0.02)
    between = [step(host_op_s=host_op_s * 1e-6) for host_op_s in range(1, 100, 9)]
    assert between == sorted(between)


def test_recompute_costs_a_forward_and_saves_memory(machine):
    """A backward is two forwards of products, so a third of the compute comes on top."""
    row = {**ROW, "hidden": "8192", "heads": "64", "ffn_hidden": "32768", "micro_batch": "8"}
    none, full = (
        RowPrices().estimate(parse_row({**row, "recompute": recompute}), *machine)
        for recompute in ("none", "full")
    )
    assert none.path.parts["recompute_s"] == 0
    assert full.path.parts["recompute_s"] / full.path.parts["compute_s"] == pytest.approx(
        1 / 3, rel=0.1
    )
    assert full.peak_bytes < none.peak_bytes


def test_low_precision_is_faster_and_overlap_hides(machine):
    """V14, D18: fp8 shortens products on a device that has it; ZeRO-3 gathers hide behind work."""
    profile = load_profile("h100-sxm5-80gb")
    rates = load_rates(profile)
    base = parse_row({**ROW, "stack": "megatron-te", "gpu": "H100-SXM", "dtype": "bf16",
                      "hidden": "8192", "heads": "64", "ffn_hidden": "32768"})  # fmt: skip
    half = parts_of(replace(base, dtype="float8_e4m3fn"), profile, rates)
    assert half["compute_s"] < parts_of(base, profile, rates)["compute_s"]
    fsdp = replace(base, stack=FSDP_FLASH, zero_stage=3, tp=1, pp=1, dp=8, micro_batch=4)
    exposed = replace(fsdp, stack=replace(FSDP_FLASH, overlaps=("gathers", "sums")))
    assert step_of(fsdp, profile, rates) < step_of(exposed, profile, rates)


def test_experts_cost_what_their_tokens_do():
    """On ranks of their own they take exchanges and less memory; all of them take longer than a
    model that has one in their place."""
    run = parse_row(MIXTRAL)
    profile = load_profile("h100-sxm5-80gb")
    rates, prices = load_rates(profile), RowPrices()
    spread, alone = (prices.estimate(replace(run, ep=ep), profile, rates) for ep in (8, 1))
    assert alone.path.parts["tp_comm_s"] == 0 < spread.path.parts["tp_comm_s"]
    assert spread.peak_bytes < alone.peak_bytes
    dense = replace(run.sizes, experts=None)
    assert step_of(replace(run, sizes=dense, ep=1), profile, rates) < alone.step_s


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_holds_less_with_each_stage(machine, stage):
    run = replace(parse_row(ROW), stack=MEGATRON_CORE, tp=1, pp=1, dp=8)
    less, more = (
        RowPrices().estimate(replace(run, zero_stage=z), *machine).peak_bytes
        for z in (stage, stage - 1)
    )
    assert less < more
