"""Words and names of rows: what people write for dtypes, schedules, sharding, recompute, models."""

import pytest

from costmodel.execution import find_execution
from costmodel.table.rows.named_models import (
    NAMED,
    NamedModel,
    model_of_size,
    named_model,
    params_in_name,
)
from costmodel.table.rows.row_sizes import check_divides, sizes_of_row
from costmodel.table.rows.row_words import (
    Cells,
    RowError,
    dtype_of,
    gated_of,
    is_blank,
    recompute_of,
    schedule_of,
    stack_of,
    zero_of,
)

CORE = find_execution("megatron-core")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("None", "none"), ("0.0", "none"), ("no recompute", "none"),
        ("no activation checkpointing", "none"), ("without AC", "none"),
        ("selective (core attn)", "selective"), ("SAC", "selective"),
        ("selective: moe_act, layernorm", "selective: moe_act, layernorm"),
        ("full", "full"), ("block, 1 layer", "full"), ("1", "full"), ("AC", "full"),
        ("non-uniform", "full"), ("sometimes", None),
    ],
)  # fmt: skip
def test_words_of_recompute(text, kind):
    assert recompute_of(text) == kind


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("none", 0), ("0", 0), ("DDP", 0), ("1", 1), ("ZeRO-1", 1), ("distributed optimizer", 1),
        ("2", 2), ("stage 2", 2), ("SHARD_GRAD_OP", 2), ("3", 3), ("FSDP", 3), ("FSDP2", 3),
        ("HYBRID_SHARD", 3), ("FSDP FULL_SHARD", 3),
        # FSDP shards as its strategy says.
        ("FSDP SHARD_GRAD_OP", 2), ("FSDP (ZeRO-2)", 2), ("FSDP, NO_SHARD", 0), ("", None),
    ],
)  # fmt: skip
def test_words_of_sharding(text, stage):
    assert zero_of(text) == stage


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("1F1B", "1f1b"), ("interleaved 1F1B", "interleaved-1f1b"),
        ("1F1B (non-interleaved)", "1f1b"), ("1F1B without interleaving", "1f1b"),
        ("GPipe", "gpipe"), ("ZB-H1", "zb-1p"), ("ZB-H2", "zb-2p"), ("DualPipe", "zb-v"),
        ("of ours", None),
    ],
)  # fmt: skip
def test_words_of_schedules(text, schedule):
    assert schedule_of(text) == schedule


@pytest.mark.parametrize(
    ("text", "gated"),
    [
        ("SwiGLU", True), ("gated", True), ("1", True), ("2.0", True), ("0", False),
        ("GELU", False), ("squared ReLU", False), ("non-gated", False), ("ungated", False),
        ("mixture", None),
    ],
)  # fmt: skip
def test_words_of_feed_forwards(text, gated):
    assert gated_of(text) is gated


def test_words_of_stacks_and_dtypes():
    names = {
        "DeepSpeed ZeRO-3": "deepspeed-zero3",
        "Megatron-DeepSpeed": "megatron-deepspeed",
        "NeMo / Megatron-Core": "megatron-core",
        "Megatron-LM": "megatron-classic",
        "PyTorch FSDP": "fsdp-flash",
        "torchtitan": "torchtitan",
        "nanotron ": "nanotron",
    }
    assert {text: stack_of(text).name for text in names} == names
    assert stack_of("abacus") is None
    dtypes = {
        "MXFP8": "float8_e4m3fn",
        "bf16 mixed": "bfloat16",
        "AMP": "float16",
        "TF32": "float32",
    }
    assert {text: dtype_of(text) for text in dtypes} == dtypes
    assert [is_blank(cell) for cell in (float("nan"), " N/A ", 0)] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama-2-7B", (32, 4096)), ("llama-3.1-8B", (32, 4096)), ("Llama 3.3 70B", (80, 8192)),
        ("LLaMA-65B", (80, 8192)), ("Mixtral-8x7B (46.7B)", (32, 4096)),
        ("GPT-3 175B", (96, 12288)),
        ("DeepSeek-R1", (61, 7168)),
        # Small models are not those of ten times their size, and distilled ones not their teacher.
        ("Llama-1.3B", None), ("Sheared-LLaMA-2.7B", None), ("llama 1.7b", None),
        ("DeepSeek-R1-Distill-Llama-70B", (80, 8192)), ("DeepSeek-R1-Distill-Qwen-32B", None),
        ("", None),
    ],
)  # fmt: skip
def test_models_are_known_by_their_names(name, sizes):
    found = named_model(name)
    assert (None if found is None else (found.layers, found.hidden)) == sizes


def test_sizes_of_known_models_go_together():
    for pattern, model in NAMED:
        assert isinstance(model, NamedModel), pattern
        assert model.heads % model.kv_heads == 0, pattern
        assert model.head_dim or model.hidden % model.heads == 0, pattern
        assert model.experts_per_token <= model.num_experts, pattern
        assert bool(model.dense_layers) == bool(model.dense_ffn), pattern


@pytest.mark.parametrize(
    ("name", "params"),
    [("Foo-13B", 13e9), ("ours 350M", 350e6), ("Llama-1.3B", 1.3e9), ("Mixtral-8x7B", None),
     ("v3.1-8b", 8e9), ("3 bits", None)],
)  # fmt: skip
def test_parameters_that_a_name_states(name, params):
    assert params_in_name(name) == params


@pytest.mark.parametrize("params", [1e6, 125e6, 1.3e9, 13e9, 175e9, 1e12])
def test_a_usual_model_has_the_parameters_of_its_name(params):
    """12 * layers * hidden ** 2, hidden a multiple of 128 near 128 times the layers."""
    layers, hidden = model_of_size(params)
    assert hidden % 128 == 0
    if params >= 125e6:
        assert 12 * layers * hidden**2 == pytest.approx(params, rel=0.1)
        assert hidden / layers == pytest.approx(128, rel=0.35)


def shape(**row: str):
    cells = Cells({"seq_len": "2048", **row})
    return sizes_of_row(cells, CORE), cells.assumed


def test_columns_count_before_a_known_model_s_sizes():
    found, _ = shape(model="llama-2-7b", layers="16", vocab="64000")
    assert (found.layers, found.hidden, found.heads, found.vocab) == (16, 4096, 32, 64000)
    # Another width is another model: heads of 128, a feed-forward of 4 times the width.
    other, assumed = shape(model="llama-2-7b", layers="16", hidden="1024")
    assert (other.heads, other.kv_heads, other.ffn_hidden, other.vocab) == (8, 8, 4096, 51200)
    assert {"heads=8", "ffn_hidden=4096"} <= set(assumed)


def test_heads_divide_over_tp():
    """1.3e9 parameters: 24 layers of 2176; 17 heads of 128 are 16 for tp=8."""
    found, _ = shape(model="Llama-1.3B", tp="8")
    assert found.heads % 8 == 0
    assert 12 * found.layers * found.hidden**2 == pytest.approx(1.3e9, rel=0.1)


def test_a_shortened_model_keeps_as_large_a_part_of_dense_layers():
    """DeepSeek-V3 has 3 of 61: of 20 layers 1, of 40 2; more layers are as many dense ones."""
    dense = {
        n: shape(model="DeepSeek-V3", layers=str(n))[0].experts.dense_layers
        for n in (2, 20, 40, 80)
    }
    assert dense == {2: 1, 20: 1, 40: 2, 80: 3}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"model": "Qwen3-Next-80B-A3B"}, "is not one we have the sizes of"),
        ({"model": "ours 1000T", "params_b": "1e9"}, "parameters is not priced"),
        (
            {"hidden": "1024", "layers": "8", "heads": "16", "kv_heads": "3"},
            "does not divide heads",
        ),
        ({"model": "Mixtral-8x7B", "experts_per_token": "9"}, "more than num_experts=8"),
        ({"layers": "8"}, "column hidden is blank"),
    ],
)
def test_odd_sizes_are_told(row, told):
    with pytest.raises(RowError, match=told):
        shape(**row)


def test_what_does_not_divide_is_named():
    check_divides("tp", 4, "heads", 32)
    with pytest.raises(RowError, match="tp=3 does not divide heads=32"):
        check_divides("tp", 3, "heads", 32)
