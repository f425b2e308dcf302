"""Rows of numbers: Megatron's formulas to the byte, sane limits, refusals in one line."""

import csv
import time
from dataclasses import replace

import pytest

from costmodel.execution import find_execution
from costmodel.table.fit_rates import (
    RANGES,
    MeasuredRun,
    fit_rates,
    held_out_errors,
    relative_errors,
)
from costmodel.table.published import RowError, estimate_run, estimate_run_memory, parse_row
from costmodel.table.rates import FITTED, load_rates
from costmodel.table.rows import rows
from costmodel.table.rows.devices import device_of, is_scaled
from costmodel.table.rows.row_files import estimate_file, read_rows
from costmodel.table.rows.row_stack import (
    EAGER_FLASH,
    FSDP_FLASH,
    MEGATRON_CLASSIC,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
)
from costmodel.table.rows.rows import estimate_rows, predict_row
from costmodel.table.run_memory import layer_activation_bytes, layers_in_flight
from costmodel.table.transformer import Split, TransformerShape
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


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_one_microbatch_goes_through_all_stages(machine, pp):
    """P4: with one microbatch, stages take as long one after the other as on one device, however
    unequal they are."""
    profile, rates = machine
    free = replace(rates, network_efficiency=1e12, link_efficiency=1e12)
    row = {**ROW, "tp": "1", "dp": "1", "gpus": "", "hidden": "8192", "heads": "64",
           "ffn_hidden": "32768", "vocab": "512000", "global_batch": "2"}  # fmt: skip

    def seconds(pp):
        parts = estimate_run(parse_row({**row, "pp": str(pp)}), profile, free)
        return parts.compute_s + parts.host_s + parts.recompute_s + parts.bubble_s

    assert seconds(pp) == pytest.approx(seconds(1), rel=1e-3)


def test_rows_of_logits_that_are_not_aligned_are_slow(machine):
    """A vocabulary of 50257 has rows that start at any byte; tp pads it."""

    def extra(**changes):
        odd, padded = (
            estimate_run(parse_row({**ROW, **changes, "vocab": vocab}), *machine).compute_s
            for vocab in ("50257", "50304")
        )
        return odd / padded - 1

    assert extra(tp="1", gpus="4") > 0.01
    assert abs(extra()) < 0.001


def test_host_and_device_wait_for_each_other_where_both_are_as_slow(machine):
    """Far from that point, a phase takes what the slower of them takes."""
    profile, rates = machine
    row = {**ROW, "tp": "1", "pp": "1", "dp": "8", "hidden": "1024"}

    def step(**changes):
        changes |= {"host_backward_op_s": changes["host_op_s"] / 2}
        return estimate_run(parse_row(row), profile, replace(rates, **changes)).step_s

    idle, busy = step(host_op_s=1e-9), step(host_op_s=1e-3)
    assert step(host_op_s=2e-9) == pytest.approx(idle)
    assert step(host_op_s=2e-3) == pytest.approx(2 * busy, rel=0.02)
    between = [step(host_op_s=host_op_s * 1e-6) for host_op_s in range(1, 100)]
    assert between == sorted(between)


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
    assert run.stack is MEGATRON_CORE
    assert set(run.assumed) >= {"sp=1", "zero_stage=1", "recompute=none"}


@pytest.mark.parametrize(
    ("changed", "vpp"),
    [({}, 3), ({"schedule": "1f1b"}, 1), ({"global_batch": "36"}, 1), ({"vpp": "2"}, 2),
     ({"stack": "megatron-classic"}, 1), ({"layers": "46"}, 23), ({"layers": "23"}, 1)],
)  # fmt: skip
def test_transformer_engine_deals_virtual_stages(changed, vpp):
    """Of about four layers, where the batch divides and the row names neither vpp nor schedule."""
    row = {**ROW, "stack": "megatron-te", "schedule": "", "vpp": ""}
    assert parse_row({**row, **changed}).vpp == vpp


def test_embedding_and_head_take_layers_places():
    """Llama 3's 126 layers on 16 ranks: 128 places are dealt, in stages of 4."""
    row = {**ROW, "stack": "megatron-te", "schedule": "", "vpp": "", "layers": "126", "pp": "16",
           "gpus": "64"}  # fmt: skip
    assert parse_row({**row, "global_batch": "64"}).vpp == 2
    assert parse_row({**row, "global_batch": "68"}).vpp == 1


@pytest.mark.parametrize(
    ("stack", "changed", "meant"),
    [
        ("Megatron-LM", {}, MEGATRON_CLASSIC),
        ("Megatron-LM", {"gpu": "H100"}, MEGATRON_CORE),
        ("Megatron-LM", {"gated_ffn": "SwiGLU"}, MEGATRON_CORE),
        ("Megatron-LM (flash attention)", {}, MEGATRON_CORE),
        ("megatron-classic", {"gpu": "H100"}, MEGATRON_CLASSIC),
        ("GPT-NeoX", {}, MEGATRON_DEEPSPEED),
        ("GPT-NeoX", {"seq_len": "8k"}, EAGER_FLASH),
        ("DeepSpeed ZeRO-3", {"zero_stage": "3", "kv_heads": "4"}, FSDP_FLASH),
        ("DeepSpeed", {"zero_stage": "3", "gpu": "H100"}, FSDP_FLASH),
        ("other", {"gpu": "H100"}, EAGER_FLASH),
        ("other", {"model": "llama2-7b", "gated_ffn": ""}, EAGER_FLASH),
        ("", {"gpu": "H100"}, MEGATRON_CORE),
    ],
)
def test_a_framework_is_what_it_was_at_the_time(stack, changed, meant):
    """Attention is fused on later devices, in gated models, with shared keys, in long sequences."""
    assert parse_row({**ROW, "stack": stack, **changed}).stack is meant


@pytest.mark.parametrize(
    ("changed", "size"),
    [({}, 4), ({"seq_len": "2048"}, 2), ({"seq_len": "8k"}, 1), ({"global_batch": "24"}, 2),
     ({"global_batch": "12"}, 1), ({"pp": "1", "dp": "4", "global_batch": "16"}, 4)],
)  # fmt: skip
def test_an_open_microbatch_is_of_usual_size(changed, size):
    """4096 tokens, if that leaves a pipeline of two ranks four microbatches."""
    assert parse_row({**ROW, "micro_batch": "", **changed}).micro_batch == size


def test_an_open_microbatch_is_one_that_fits():
    """Of FSDP all samples of a rank go at once, if they fit; the microbatch is then said."""
    row = {**ROW, "stack": "FSDP", "gpus": "8", "model": "llama2-7b", "seq_len": "4096", "tp": "1",
           "pp": "1", "dp": "8", "global_batch": "256", "micro_batch": "", "zero_stage": "3",
           "recompute": "none"}  # fmt: skip
    sizes = ("layers", "hidden", "heads", "ffn_hidden", "gated_ffn", "vocab")
    (line,) = estimate_rows([{**row, **dict.fromkeys(sizes, "")}])
    assert "micro_batch=2;" in line["assumed"]
    assert line["predicted_fits"] == "yes"
    assert line["predicted_peak_mem_gib"] < 80


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": ""}, "column layers is blank"),
        ({"layers": "0"}, "layers=0 must be at least 1"),
        ({"tp": "3", "gpus": "12"}, "tp=3 does not divide heads=16"),
        ({"dtype": "fp2"}, "dtype 'fp2' is not priced"),
        ({"micro_batch": "0"}, "micro_batch=0 must be at least 1"),
        ({"gpus": "64"}, r"tp\*cp\*pp\*dp = 8 does not equal gpus=64"),
        ({"hidden": "many"}, "column hidden"),
        ({"hidden": "1e15"}, "more than any run has"),
        ({"layers": "inf"}, "column layers"),
        ({"layers": "12.5"}, "layers=12.5 must be a whole number"),
        ({"heads": "0"}, "heads=0 must be at least 1"),
        ({"kv_heads": "3"}, "kv_heads=3 does not divide heads=16"),
        ({"ffn_hidden": "1"}, "tp=2 is more than ffn_hidden=1"),
        ({"ep": "-1"}, "ep=-1 must be at least 0"),
        ({"ep": "3"}, "ep=3 does not divide num_experts=8"),
        ({"vpp": "1000"}, "is more than layers=24"),
        ({"hidden": "", "params_b": "-13"}, "a model of -1.3e.10 parameters"),
        ({"hidden": "", "layers": "", "model": "Foo-80B-A3B"}, "not one we have the sizes of"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(changed, message):
    with pytest.raises(RowError, match=message):
        parse_row({**ROW, **changed})
    (line,) = estimate_rows([{**ROW, **changed}])
    assert line["reason"]
    assert line["predicted_step_time_s"] == ""


def test_a_row_that_breaks_the_estimate_costs_no_other(monkeypatch):
    """D18: a mistake of ours shows in its row; the rows beside it are predicted."""
    whole = rows.run_of

    def breaks(row):
        return whole(row) if row["layers"] == ROW["layers"] else 1 / 0

    monkeypatch.setattr(rows, "run_of", breaks)
    broken, sound = estimate_rows([{**ROW, "layers": "7"}, ROW])
    assert broken["reason"] == "its numbers cannot be priced (division by zero)"
    assert (sound["reason"], sound["predicted_fits"]) == ("", "yes")


@pytest.mark.parametrize("notes", ["0 Gb/s between nodes", ". Gb/s between nodes", None])
def test_notes_that_state_no_rate(notes):
    assert predict_row({**ROW, "notes": notes}) == predict_row(ROW)


@pytest.mark.parametrize(
    ("column", "text", "field", "meant"),
    [
        ("tp", " 2.0 ", "tp", 2),
        ("global_batch", "1,024", "global_batch", 1024),
        ("sp", "True", "sequence_parallel", True),
        ("stack", "NeMo 2.0", "stack", MEGATRON_CORE),
        ("stack", "torchtitan", "stack", find_execution("torchtitan")),
        ("recompute", "block 12", "recompute", "full"),
        ("recompute", "off", "recompute", "none"),
        ("recompute", "op (SAC)", "recompute", "selective"),
        ("dtype", "FP8-CS", "dtype", "float8_e4m3fn"),
        ("dtype", "BFloat16", "dtype", "bfloat16"),
        ("schedule", "Interleaved 1F1B", "vpp", 2),
        ("schedule", "ZB-H2", "schedule", "zb-2p"),
        ("schedule", "AFAB", "schedule", "gpipe"),
        ("vpp", "3", "schedule", "interleaved-1f1b"),
        ("zero_stage", "FSDP", "zero_stage", 3),
        ("zero_stage", "none", "zero_stage", 0),
        ("zero_stage", "ZeRO-2", "zero_stage", 2),
        ("global_batch", "64k tokens", "global_batch", 62),
        ("micro_batch", "auto", "micro_batch", 4),
        ("micro_batch", "64", "micro_batch", 16),
    ],
)
def test_words_of_frameworks(column, text, field, meant):
    """D18: numbers with units, and the words that frameworks and people use."""
    row = {**ROW, column: text}
    if column == "schedule":
        row["vpp"] = ""
    assert getattr(parse_row(row), field) == meant


@pytest.mark.parametrize(
    ("gpu", "memory_gb", "name"),
    [
        ("A100-SXM4-80GB", "", "A100 SXM"),
        ("A100-SXM", "40.0", "A100 SXM 40GB"),
        ("NVIDIA A100-PCIe 40GB", "", "A100 PCIe 40GB"),
        ("h100 80gb hbm3", "", "H100 SXM"),
        ("H100-SXM (96GB HBM2e, 500W)", "96", "H100 with HBM2e"),
        ("H200-SXM", "141", "H200"),
        ("NVIDIA H20", "", "H20"),
        ("GB200 NVL72", "186", "GB200 NVL72"),
        ("L40S", "", "L40S"),
        ("AMD Instinct MI250X", "", "MI250X, one die"),
        ("Intel Gaudi 2", "", "Gaudi 2"),
        ("TPU v5p", "", "TPU v5p"),
        ("A100-SXM", "81920", "A100 SXM"),
    ],
)
def test_names_of_devices(gpu, memory_gb, name):
    """A device without a profile is priced by its reference device, and the row says so."""
    device = device_of(gpu, float(memory_gb) if memory_gb else None)
    assert device.name == name
    (line,) = estimate_rows([{**ROW, "gpu": gpu, "gpu_mem_gb": memory_gb, "dtype": "bf16"}])
    assert line["reason"] == ""
    assert (f"scaled to {name}" in line["assumed"]) == is_scaled(device)


def test_less_bandwidth_is_slower():
    """A device's own data sheet counts, not only its reference device's rates."""
    seconds = [
        predict_row({**ROW, "gpu": gpu})["predicted_step_time_s"]
        for gpu in ("A100-SXM 80GB", "A100-SXM 40GB", "V100-SXM2")
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1]


def test_dtypes_a_device_lacks_are_widened():
    wide = predict_row({**ROW, "dtype": "bf16"})
    narrow = predict_row({**ROW, "dtype": "fp8"})
    assert narrow["predicted_step_time_s"] == wide["predicted_step_time_s"]
    assert "dtype=bfloat16: NVIDIA A100-SXM4-80GB has no float8" in narrow["assumed"]


def test_an_open_layout_is_filled_so_that_the_weights_fit():
    """What a row leaves open follows from its GPUs, and is said."""
    row = {**ROW, "gpus": "1024", "layers": "96", "hidden": "12288", "heads": "96",
           "ffn_hidden": "", "tp": "", "pp": "", "dp": "", "vpp": "", "global_batch": "1536",
           "stack": "megatron-te", "gpu": "H100"}  # fmt: skip
    run = parse_row(row)
    assert run.gpus == 1024
    assert run.shape.num_params * 18 / (run.tp * run.pp) <= 40e9
    assert {f"tp={run.tp}", f"pp={run.pp}", f"dp={run.dp}"} <= set(run.assumed)


def test_named_models_fill_blank_sizes():
    sizes = ("layers", "hidden", "heads", "ffn_hidden", "gated_ffn", "vocab")
    blank = {**ROW, **dict.fromkeys(sizes, ""), "model": "Llama 3.1 70B"}
    shape = parse_row(blank).shape
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.vocab) == (80, 8192, 8, 128256)
    assert shape.num_params == pytest.approx(69.5e9, rel=0.01)  # one of its two embeddings
    by_size = parse_row({**blank, "model": "ours", "params_b": "7"}).shape
    assert by_size.num_params == pytest.approx(7e9, rel=0.1)
    assert parse_row({**blank, "model": "Ours-7B"}).shape == by_size
    layout = ("gpus", "tp", "pp", "dp", "vpp", "global_batch", "micro_batch", "schedule")
    (line,) = estimate_rows([{"model": "Llama-3-70B", "gpu": "H100", **dict.fromkeys(layout, "")}])
    assert line["reason"] == ""
    assert "gpus=32" in line["assumed"]


MIXTRAL = {
    **ROW, "stack": "megatron-te", "gpu": "H100-SXM", "dtype": "bf16", "model": "Mixtral-8x7B",
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn_hidden": "14336",
    "gated_ffn": "1", "vocab": "32000", "tp": "1", "pp": "1", "dp": "8", "ep": "8",
    "recompute": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "whole", "used"),
    [("DeepSeek-V3", 671, 37), ("DeepSeek-V2", 236, 21), ("DeepSeek-V2-Lite", 15.7, 2.4),
     ("Kimi-K2", 1026, 32)],
)  # fmt: skip
def test_latent_attention_has_the_parameters_it_is_known_for(name, whole, used):
    """Billions of parameters, and of those that one token is multiplied with: the authors'."""
    shape = parse_row({"model": name, "gpu": "H100", "tp": "1", "pp": "1", "dp": "64"}).shape
    ends = 2 * shape.embedding_params
    assert (shape.num_params + shape.embedding_params) / 1e9 == pytest.approx(whole, rel=0.06)
    assert (shape.layers * shape.used_params + ends) / 1e9 == pytest.approx(used, rel=0.13)


def test_latent_attention_multiplies_its_own_matrices():
    """Its products on one of two ranks: down for both, up and out split over heads."""
    shape = replace(GPT3, query_rank=1536, key_rank=512, rope_dim=64)
    assert shape.attention_matrices(2) == [
        (1536 + 512 + 64, 12288), (96 * (128 + 64) // 2, 1536), (12288, 512), (12288, 6144)
    ]  # fmt: skip
    assert shape.score_width == 96 * (192 + 128) / 2


def test_experts_lie_on_tensor_parallel_ranks_where_there_are_no_others():
    row = {**ROW, "num_experts": "8", "experts_per_token": "2", "dp": "4", "pp": "1", "vpp": "1"}
    both, data = parse_row({**row, "ep": "8"}), parse_row({**row, "ep": "4"})
    assert (both.data_ep, both.etp) == (4, 1)
    assert (data.data_ep, data.etp) == (4, 2)
    assert parse_row({**row, "ep": "4", "notes": "dispatcher alltoall etp 1.0"}).etp == 1


def test_experts_cost_what_their_tokens_do():
    """Mixtral-8x7B: 46.7e9 parameters, 12.9e9 of them used by a token (its paper, section 2)."""
    run = parse_row(MIXTRAL)
    assert run.shape.num_params == pytest.approx(46.7e9, rel=0.01)
    used = run.shape.layers * run.shape.used_params + run.shape.embedding_params
    assert used == pytest.approx(12.9e9, rel=0.02)
    profile = load_profile("h100-sxm5-80gb")
    rates = load_rates(profile)
    spread, alone = (estimate_run(replace(run, ep=ep), profile, rates) for ep in (8, 1))
    assert alone.ep_comm_s == 0 < spread.ep_comm_s
    assert estimate_run_memory(run).total < estimate_run_memory(replace(run, ep=1)).total
    dense = replace(run.shape, num_experts=1, experts_per_token=1)
    assert estimate_run(replace(run, shape=dense, ep=1), profile, rates).step_s < alone.step_s


def test_a_run_too_large_is_said_not_to_fit():
    """M11: the memory programs see, less the context, and what the allocator wastes."""
    large = {**ROW, "layers": "96", "hidden": "8192", "heads": "64", "ffn_hidden": "32768"}
    assert predict_row(ROW)["predicted_fits"] == "yes"
    assert predict_row(large)["predicted_fits"] == "no"


def test_what_a_row_leaves_open_may_make_it_fit():
    """M11: gradients in 16 bits and recompute are no columns, or blank, in published tables."""
    row = {**ROW, "stack": "megatron-te", "gpu": "H100", "hidden": "8192", "heads": "64",
           "ffn_hidden": "32768", "tp": "4", "pp": "2", "dp": "1", "seq_len": "8192"}  # fmt: skip
    again = {**row, "layers": "24", "recompute": ""}
    assert predict_row(again)["predicted_fits"] == "yes, with full recompute"
    assert predict_row({**again, "recompute": "none"})["predicted_fits"] == "no"
    lean = {**row, "layers": "36", "recompute": "full"}
    assert predict_row(lean)["predicted_fits"] == "yes, with 16-bit gradients"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_holds_less_with_each_stage(stage):
    run = replace(parse_row(ROW), stack=MEGATRON_CORE, tp=1, pp=1, dp=8)
    less, more = (estimate_run_memory(replace(run, zero_stage=z)) for z in (stage, stage - 1))
    assert less.total < more.total


def test_rates_are_found_again(machine):
    """A fit to runs that known rates made returns what those rates predict."""
    profile, rates = machine
    truth = replace(rates, matmul_efficiency=0.6, memory_efficiency=0.7, host_op_s=6e-5)
    changes = [
        {"micro_batch": b, "tp": tp, "pp": pp, "dp": str(8 // (tp * pp)), "hidden": str(h),
         "heads": str(h // 128), "ffn_hidden": str(4 * h)}
        for b, tp, pp, h in ((1, 1, 1, 2048), (4, 1, 1, 4096), (2, 2, 1, 4096), (1, 4, 2, 8192),
                             (8, 1, 2, 2048), (4, 2, 2, 1024), (2, 8, 1, 8192), (1, 1, 1, 1024))
    ]  # fmt: skip
    runs = []
    for change in changes:
        run = parse_row({**ROW, **change})
        seconds = estimate_run(run, profile, truth).step_s
        runs.append(MeasuredRun(run=run, profile=profile, rates=rates, step_s=seconds))
    values, told = fit_rates(runs, pull=0.0)
    assert abs(relative_errors(runs, values)).max() < 0.01
    assert "matmul_efficiency" in told
    assert "portable_attention_efficiency" not in told
    parts = ["one", "two"] * 4
    unseen = held_out_errors(runs, parts, start=values, pull=0.0)
    assert abs(unseen).max() < 0.05


def test_one_run_hardly_moves_a_rate(machine):
    """What few runs say weighs little against what other devices told; many runs have their way."""
    profile, rates = machine
    run = parse_row(ROW)
    slow = 1.5 * estimate_run(run, profile, rates).step_s
    one = MeasuredRun(run=run, profile=profile, rates=rates, step_s=slow)
    usual = {name: value for name, (_, value, _) in RANGES.items()}
    errors = [float(relative_errors([one], usual)[0])]
    errors += [
        float(relative_errors([one], fit_rates([one] * count, evaluations=8)[0])[0])
        for count in (1, 20)
    ]
    assert errors[0] < errors[1] < errors[2] < 0
    assert abs(errors[2]) < 0.05


def test_a_file_of_rows(tmp_path):
    """Two thousand rows in far less than a minute, one core."""
    source, target = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    runs = [{**ROW, "global_batch": str(4 * (i % 50 + 1))} for i in range(2000)]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows(runs)
    start = time.process_time()
    assert estimate_file(source, target) == (2000, 2000)
    assert time.process_time() - start < 30
    predicted = read_rows(target)
    assert len(predicted) == 2000
    assert all(float(row["predicted_step_time_s"]) > 0 for row in predicted)
    assert all(float(row["predicted_peak_mem_gib"]) > 0 for row in predicted)


@pytest.mark.parametrize(
    "write",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("24", "24\0").encode("latin-1"),
        lambda text: text.replace(",", ";").encode(),
        lambda text: text.replace(",", " ,\t").upper().encode(),
        lambda text: ("\n\n" + text.replace("\n", ",of no column\n", 2)).encode(),
        lambda text: text.replace("layers", "layers,Layers", 1).replace("24", "24,x", 1).encode(),
    ],
    ids=["bom", "crlf", "utf16", "nul", "semicolons", "spaces", "ragged", "twice"],
)
def test_files_of_spreadsheets(tmp_path, write):
    """D18: whatever a table was saved with, its rows are predicted as they are."""
    source, target = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    source.write_bytes(write(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n"))
    assert estimate_file(source, target) == (1, 1)
    (row,) = read_rows(target)
    assert float(row["predicted_step_time_s"]) == predict_row(ROW)["predicted_step_time_s"]


def test_foreign_files_are_one_line(tmp_path):
    with pytest.raises(PlannerError, match="no file"):
        read_rows(tmp_path / "none.csv")
    for text in ("", "a,b\n1,2\n"):
        (tmp_path / "odd.csv").write_text(text)
        with pytest.raises(PlannerError, match="lacks column gpu"):
            read_rows(tmp_path / "odd.csv")


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
