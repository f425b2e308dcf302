"""A row is read: words of frameworks, blanks filled and said, refusals in one line."""

from operator import attrgetter

import pytest

from costmodel.execution import find_execution
from costmodel.table.rows.model_counts import ModelCounts
from costmodel.table.rows.row_stack import (
    EAGER_FLASH,
    FSDP_FLASH,
    MEGATRON_CLASSIC,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
)
from costmodel.table.rows.row_words import RowError
from costmodel.table.rows.rows import estimate_rows
from costmodel.table.rows.run_row import parse_row
from tests.costmodel.table.rows_of_runs import ROW


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


def test_an_open_layout_is_filled_so_that_the_weights_fit():
    """What a row leaves open follows from its GPUs, and is said."""
    row = {**ROW, "gpus": "1024", "layers": "96", "hidden": "12288", "heads": "96",
           "ffn_hidden": "", "tp": "", "pp": "", "dp": "", "vpp": "", "global_batch": "1536",
           "stack": "megatron-te", "gpu": "H100"}  # fmt: skip
    run = parse_row(row)
    assert run.gpus == 1024
    assert ModelCounts(run.sizes).num_params * 18 / (run.tp * run.pp) <= 40e9
    assert {f"tp={run.tp}", f"pp={run.pp}", f"dp={run.dp}"} <= set(run.assumed)


def test_named_models_fill_blank_sizes():
    sizes = ("layers", "hidden", "heads", "ffn_hidden", "gated_ffn", "vocab")
    blank = {**ROW, **dict.fromkeys(sizes, ""), "model": "Llama 3.1 70B"}
    sizes = parse_row(blank).sizes
    assert (sizes.layers, sizes.hidden, sizes.kv_heads, sizes.vocab) == (80, 8192, 8, 128256)
    assert ModelCounts(sizes).num_params == pytest.approx(
        69.5e9, rel=0.01
    )  # one of its two embeddings
    by_size = parse_row({**blank, "model": "ours", "params_b": "7"}).sizes
    assert ModelCounts(by_size).num_params == pytest.approx(7e9, rel=0.1)
    assert parse_row({**blank, "model": "Ours-7B"}).sizes == by_size
    layout = ("gpus", "tp", "pp", "dp", "vpp", "global_batch", "micro_batch", "schedule")
    (line,) = estimate_rows([{"model": "Llama-3-70B", "gpu": "H100", **dict.fromkeys(layout, "")}])
    assert line["reason"] == ""
    assert "gpus=32" in line["assumed"]


def test_experts_lie_on_tensor_parallel_ranks_where_there_are_no_others():
    row = {**ROW, "num_experts": "8", "experts_per_token": "2", "dp": "4", "pp": "1", "vpp": "1"}
    both, data = parse_row({**row, "ep": "8"}), parse_row({**row, "ep": "4"})
    assert both.etp == 1
    assert data.etp == 2
    assert parse_row({**row, "ep": "4", "notes": "dispatcher alltoall etp 1.0"}).etp == 1


@pytest.mark.parametrize(
    ("cells", "field", "meant"),
    [
        ({"attention": "unfused"}, "flash_attention", False),
        ({"dropout": "1"}, "dropout", True),
        ({"gradient_bytes": "2"}, "gradient_bytes", 2),
        ({"moment_bytes": "2"}, "moment_bytes", (2, 2)),
        ({"moment_bytes": "1 4"}, "moment_bytes", (1, 4)),
        ({"master_bytes": "2"}, "master_bytes", 2),
        ({"layers_on_host": "3", "pp": "1", "dp": "4"}, "layers_on_host", 3),
        ({"cp_comm": "all_gather"}, "rings_attention", False),
        ({"loss_bytes": "10"}, "loss_bytes", 10),
        ({"cp_comm": "p2p"}, "rings_attention", True),
        ({"dispatcher": "allgather"}, "dispatchers", ("allgather",)),
        ({"not_overlapped": "sums gathers"}, "overlaps", ("tp", "scatters", "stages")),
    ],
)  # fmt: skip
def test_a_row_says_parts_of_its_stack(cells, field, meant):
    stack = parse_row({**ROW, "stack": "megatron-core", **cells}).stack
    assert getattr(stack, field) == meant
    assert stack.name == "megatron-core"


@pytest.mark.parametrize(
    ("cells", "field", "meant"),
    [
        ({"norm": "RMSNorm"}, "norm", "rms"),
        ({"norm": "LayerNorm", "gated_ffn": "1"}, "norm", "layer"),
        ({"positions": "rope"}, "positions", "rotary"),
        ({"positions": "learned", "gated_ffn": "1"}, "positions", "learned"),
        ({"positions": "none"}, "positions", "none"),
        ({"bias": "0"}, "bias", False),
        ({"qk_norm": "1"}, "query_key_norm", True),
        ({"query_rank": "96", "key_rank": "64", "rope_dim": "32"}, "latent.query_rank", 96),
        ({"num_experts": "8", "dense_layers": "3", "dense_ffn": "512"}, "experts.dense_layers", 3),
        ({"num_experts": "8", "shared_width": "512"}, "experts.shared_width", 512),
        ({"max_positions": "9000"}, "max_positions", 9000),
    ],
)  # fmt: skip
def test_a_row_says_parts_of_its_model(cells, field, meant):
    assert attrgetter(field)(parse_row({**ROW, **cells}).sizes) == meant


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"norm": "batch"}, "norm 'batch' is not priced; use rms or layer"),
        ({"positions": "relative"}, "positions 'relative' are not priced; use rotary"),
        ({"attention": "half"}, "attention 'half' is not priced; use fused, flash or unfused"),
        ({"gradient_bytes": "3"}, "gradient_bytes=3 is not priced; use 2 or 4"),
        ({"moment_bytes": "3"}, "moment_bytes=3 is not priced; use 1, 2 or 4, or two of them"),
        ({"moment_bytes": "2 2 4"}, "moment_bytes=2 2 4 is not priced"),
        ({"layers_on_host": "3", "pp": "2"}, "layers_on_host=3 with a pipeline is not priced"),
        ({"not_overlapped": "moe"}, "not_overlapped=moe is no kind of collective; use some of"),
    ],
)  # fmt: skip
def test_parts_that_are_not_priced_are_refused(cells, told):
    with pytest.raises(RowError, match=told):
        parse_row({**ROW, **cells})


def test_shared_experts_count_by_their_width():
    sizes = parse_row({**ROW, "num_experts": "8", "shared_width": "512"}).sizes
    assert ModelCounts(sizes).shared_parts == 512 / sizes.experts.width
