"""Rows of numbers: Megatron's formulas to the byte, sane limits, refusals in one line."""

import csv
import time
from dataclasses import replace

import pytest

from costmodel.published import RowError, estimate_run, parse_row
from costmodel.rates import FITTED, load_rates
from costmodel.rows import estimate_file, estimate_rows, read_rows
from costmodel.run_memory import layer_activation_bytes, layers_in_flight
from costmodel.stacks import FSDP_FLASH, MEGATRON_CLASSIC, MEGATRON_TE
from costmodel.transformer import Split, TransformerShape
from planner.errors import PlannerError, ProfileError
from planner.schedule import build_schedule, in_flight
from profiles import load_profile

ROW = {
    "stack": "megatron-classic", "gpu": "A100-SXM", "gpus": "8", "layers": "24", "hidden": "2048",
    "heads": "16", "ffn_hidden": "8192", "gated_ffn": "0", "vocab": "50257", "seq_len": "1024",
    "global_batch": "32", "micro_batch": "2", "tp": "2", "sp": "0", "cp": "1", "pp": "2",
    "vpp": "1", "dp": "2", "ep": "1", "zero_stage": "0", "schedule": "1f1b", "recompute": "full",
    "dtype": "fp16",
}  # fmt: skip
GPT3 = TransformerShape(
    layers=96, hidden=12288, heads=96, kv_heads=96, ffn_hidden=4 * 12288, gated=False,
    vocab=51200, seq_len=2048,
)  # fmt: skip


@pytest.fixture(scope="module")
def machine():
    profile = load_profile("a100-sxm4-80gb")
    return profile, load_rates(profile)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_activation_formula(t, sequence_parallel):
    """M16: Korthikanti et al. 2022, table 2: sbh(10 + 24/t + 5as/(ht)), sbh/t(34 + 5as/h)."""
    s, b, h, a = GPT3.seq_len, 4, GPT3.hidden, GPT3.heads
    split = Split(micro_batch=b, tp=t, cp=1, sequence_parallel=sequence_parallel, dtype="float16")
    if sequence_parallel:
        expected = s * b * h / t * (34 + 5 * a * s / h)
    else:
        expected = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert layer_activation_bytes(GPT3, split, MEGATRON_CLASSIC) == expected
    selective = layer_activation_bytes(GPT3, split, MEGATRON_CLASSIC, recompute="selective")
    assert selective == expected - 5 * a * s * s * b / t
    whole = layer_activation_bytes(GPT3, split, MEGATRON_CLASSIC, recompute="full")
    assert whole == 2 * s * b * h / (t if sequence_parallel else 1)


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 4), (4, 16), (8, 32)])
def test_microbatches_in_flight_are_those_of_the_tables(pp, m):
    """P18: the closed forms for the first rank against the job tables themselves."""
    closed = layers_in_flight(schedule="1f1b", layers=pp, pp=pp, vpp=1, num_microbatches=m)
    assert closed == in_flight(build_schedule("1f1b", pp=pp, vpp=1, num_microbatches=m))[0]
    table = build_schedule("interleaved_1f1b", pp=pp, vpp=2, num_microbatches=m)
    closed = layers_in_flight(
        schedule="interleaved-1f1b", layers=2 * pp, pp=pp, vpp=2, num_microbatches=m
    )
    assert closed == in_flight(table)[0]


def test_model_flop_is_megatrons():
    """72 B s l h^2 (1 + s/6h + V/12lh), Narayanan et al. 2021 without recompute."""
    s, h, n = GPT3.seq_len, GPT3.hidden, GPT3.layers
    expected = 72 * s * n * h * h * (1 + s / (6 * h) + GPT3.vocab / (12 * n * h))
    assert GPT3.model_flop() == pytest.approx(expected)


def test_parts_are_not_negative_and_one_device_communicates_nothing(machine):
    alone = {**ROW, "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "global_batch": "8"}
    parts = estimate_run(parse_row(alone), *machine)
    assert (parts.tp_comm_s, parts.pp_comm_s, parts.dp_comm_s, parts.bubble_s) == (0, 0, 0, 0)
    for name in parts.__dataclass_fields__:
        assert getattr(estimate_run(parse_row(ROW), *machine), name) >= 0, name


@pytest.mark.parametrize("column", ["layers", "ffn_hidden", "global_batch", "vocab"])
def test_more_of_anything_takes_longer(machine, column):
    """M16: monotone in each size."""
    more = {**ROW, column: str(2 * int(ROW[column]))}
    assert (
        estimate_run(parse_row(more), *machine).step_s
        > estimate_run(parse_row(ROW), *machine).step_s
    )


def test_pipeline_bubble_is_the_known_fraction(machine):
    """P4: (pp-1)/(m+pp-1) of the pipeline's time, for equal stages without transfers."""
    profile, rates = machine
    free = replace(rates, network_efficiency=1e12, link_efficiency=1e12)
    row = {**ROW, "tp": "1", "pp": "8", "dp": "1", "vocab": "1", "hidden": "8192",
           "heads": "64", "ffn_hidden": "32768"}  # fmt: skip
    parts = estimate_run(parse_row(row), profile, free)
    piped = parts.compute_s + parts.host_s + parts.recompute_s + parts.bubble_s
    assert parts.bubble_s / piped == pytest.approx(7 / (16 + 7), rel=0.02)


def test_recompute_costs_a_forward_and_saves_memory(machine):
    none = estimate_run(parse_row({**ROW, "recompute": "none"}), *machine)
    full = estimate_run(parse_row(ROW), *machine)
    assert none.recompute_s == 0 < full.recompute_s


def test_low_precision_is_faster_and_overlap_hides(machine):
    """V14, D18: fp8 shortens products on a device that has it; ZeRO-3 gathers hide behind work."""
    profile = load_profile("h100-sxm5-80gb")
    rates = load_rates(profile)
    base = parse_row({**ROW, "stack": "megatron-te", "gpu": "H100-SXM", "dtype": "bf16",
                      "hidden": "8192", "heads": "64", "ffn_hidden": "32768"})  # fmt: skip
    half = estimate_run(replace(base, dtype="float8_e4m3fn"), profile, rates)
    assert half.compute_s < estimate_run(base, profile, rates).compute_s
    fsdp = replace(base, stack=FSDP_FLASH, zero_stage=3, tp=1, pp=1, dp=8, micro_batch=4)
    exposed = replace(fsdp, stack=replace(FSDP_FLASH, overlaps_dp=False))
    assert estimate_run(fsdp, profile, rates).step_s < estimate_run(exposed, profile, rates).step_s


def test_blanks_are_filled_and_said():
    run = parse_row({**ROW, "stack": "megatron-te", "sp": "", "zero_stage": "", "recompute": ""})
    assert run.stack is MEGATRON_TE
    assert set(run.assumed) >= {"sp=1", "zero_stage=1", "recompute=none"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": ""}, "column layers is blank"),
        ({"ep": "8"}, "expert parallel"),
        ({"tp": "3", "gpus": "12"}, "tp=3 does not divide heads=16"),
        ({"dtype": "fp2"}, "dtype 'fp2' is not priced"),
        ({"gpus": "64"}, r"tp\*cp\*pp\*dp = 8 does not equal gpus=64"),
        ({"hidden": "many"}, "column hidden"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(changed, message):
    with pytest.raises(RowError, match=message):
        parse_row({**ROW, **changed})
    (line,) = estimate_rows([{**ROW, **changed}])
    assert line["reason"]
    assert line["predicted_step_time_s"] == ""


def test_a_file_of_rows(tmp_path):
    """Two thousand rows in far less than a minute, one core."""
    source, target = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    rows = [{**ROW, "global_batch": str(4 * (i % 50 + 1))} for i in range(2000)]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    start = time.process_time()
    assert estimate_file(source, target) == (2000, 2000)
    assert time.process_time() - start < 30
    predicted = read_rows(target)
    assert len(predicted) == 2000
    assert all(float(row["predicted_step_time_s"]) > 0 for row in predicted)
    assert all(float(row["predicted_peak_mem_gib"]) > 0 for row in predicted)


def test_foreign_files_are_one_line(tmp_path):
    with pytest.raises(PlannerError, match="no file"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PlannerError, match="lacks column gpu"):
        read_rows(tmp_path / "odd.csv")


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm", "h200-sxm-141gb"])
def test_shipped_rates_are_physical(name):
    """Few, named, and within what the device can do."""
    rates = load_rates(load_profile(name))
    for rate in FITTED:
        value = getattr(rates, rate)
        assert value > 0, rate
        if rate.endswith("_efficiency"):
            assert value <= 1.2, rate


def test_a_device_without_rates_says_so(machine):
    class Unknown:
        name = "abacus"

    with pytest.raises(ProfileError, match="abacus has no training"):
        load_rates(Unknown())
