"""Flags of Megatron-LM as a row: what the price of a line is of."""

from __future__ import annotations

import pytest

from costmodel.table.rows.row_plan import plan_of, transformer_of
from costmodel.table.rows.row_words import RECOMPUTED_MODULES
from costmodel.table.rows.rows import price_row
from costmodel.table.rows.run_row import RunRow, parse_row
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_refusals import RECOMPUTED, layers_with_experts, refusals
from planner.emit.megatron_row import notes_of, row_of
from planner.emit.megatron_rules import Run, broken_rules
from planner.errors import PlannerError
from planner.language.plan import Plan

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 2"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 1024"
LATENT = "--multi-latent-attention --position-embedding-type rope"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 4"


def run_of(more: str = "", gpus: int = 16, flags: str = FLAGS) -> Run:
    return Run(flags=parse_flags(f"{flags} {more}"), num_devices=gpus, model={})


def parsed(more: str, gpus: int = 16, flags: str = FLAGS) -> RunRow:
    run = run_of(f"--bf16 {more}", gpus, flags)
    assert not broken_rules(run)
    assert not refusals(run)
    return parse_row({name: str(v) for name, v in row_of(run, {}, "", "H100").items()})


def planned(more: str, gpus: int = 16, flags: str = FLAGS) -> Plan:
    row = parsed(more, gpus, flags)
    return plan_of(row, transformer_of(row), devices_per_node=8)


def peak_gib(more: str, gpus: int = 16, flags: str = FLAGS) -> float:
    row = row_of(run_of(f"--bf16 {more}", gpus, flags), {}, "", "H100")
    priced = price_row({name: str(value) for name, value in row.items()})
    return float(priced.predicted["predicted_peak_mem_gib"])


@pytest.mark.parametrize(
    ("more", "cells"),
    [
        ("", {"layers": 32, "pp": 2, "dp": 8, "vpp": 1, "zero_stage": 0, "recompute": "none",
              "dtype": "fp32", "schedule": "1F1B", "sp": 0, "global_batch": 64}),
        ("--tensor-model-parallel-size 2 --sequence-parallel --bf16",
         {"tp": 2, "dp": 4, "sp": 1, "dtype": "bf16"}),
        ("--sequence-parallel", {"tp": 1, "sp": 0}),
        (VIRTUAL, {"vpp": 4, "schedule": "interleaved"}),
        ("--use-megatron-fsdp", {"zero_stage": 3}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero_stage": 2}),
        ("--use-distributed-optimizer --fp16",
         {"zero_stage": 1, "dtype": "fp16", "gradient_bytes": 2}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {"gradient_bytes": 4}),
        ("--bf16", {"gradient_bytes": 4}),
        ("--bf16 --grad-reduce-in-bf16", {"gradient_bytes": 2}),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", {"dtype": "mxfp8"}),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", {"dtype": "fp8 current"}),
        ("--bf16 --fp4-format e2m1", {"dtype": "nvfp4"}),
        ("--recompute-activations --fp8-format hybrid",
         {"recompute": "selective: core_attn", "dtype": "fp8"}),
        ("--recompute-granularity selective --recompute-modules moe_act mlp",
         {"recompute": "selective: moe_act, mlp"}),
        ("--moe-layer-recompute", {"recompute": "selective: moe"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3",
         {"recompute": "full", "recompute_layers": 3}),
        ("--kv-channels 64 --swiglu", {"head_dim": 64, "gated_ffn": 1, "ffn_hidden": 10880}),
        ("", {"ffn_hidden": 16384, "norm": "layer", "positions": "learned", "bias": 1, "tied": 1,
              "dropout": 1, "attention": "fused"}),
        ("--normalization RMSNorm --use-rotary-position-embeddings --disable-bias-linear "
         "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0.0",
         {"norm": "rms", "positions": "rotary", "bias": 0, "tied": 0, "dropout": 0}),
        ("--position-embedding-type none --qk-layernorm", {"positions": "none", "qk_norm": 1}),
        ("--attention-backend unfused", {"attention": "unfused"}),
        ("--transformer-impl local", {"attention": "unfused", "stack": "megatron-local"}),
        ("", {"masks_batch": 1}),
        ("--deterministic-mode --tp-comm-overlap", {"deterministic": 1, "cut_products": 1}),
        ("--transformer-impl local --use-flash-attn", {"attention": "flash"}),
        # Without --group-query-attention there is a head of keys for each of queries.
        ("--num-query-groups 8", {"heads": 32, "kv_heads": 32, "gated_ffn": 0}),
        ("--group-query-attention --num-query-groups 8", {"kv_heads": 8}),
        ("--group-query-attention", {"kv_heads": 1}),
        # Words that a known tokenizer has, and what they are padded to.
        ("", {"vocab": 50257, "vocab_multiple": 128}),
        ("--tokenizer-type Llama2Tokenizer --make-vocab-size-divisible-by 64",
         {"vocab": 32000, "vocab_multiple": 64}),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model utils/nemotron_2_256k.model",
         {"vocab": 256000, "vocab_multiple": 128}),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B",
         {"vocab": 128256}),
        ("--vocab-size 99", {"vocab": 99, "vocab_multiple": 128}),
        ("--padded-vocab-size 128", {"vocab": 128, "vocab_multiple": 1}),
        ("--vocab-size 99 --no-pad-vocab-size", {"vocab": 99, "vocab_multiple": 1}),
        # An expert is as wide as its own option says, if there is one.
        ("--ffn-hidden-size 11008 --moe-ffn-hidden-size 1024", {"ffn_hidden": 11008}),
        (f"--ffn-hidden-size 11008 {EXPERTS}",
         {"ffn_hidden": 1024, "dense_ffn": 11008, "num_experts": 8, "experts_per_token": 2,
          "dispatcher": "allgather"}),
        ("--ffn-hidden-size 11008 --num-experts 8 --expert-model-parallel-size 4",
         {"ffn_hidden": 11008, "ep": 4, "etp": 1}),
        (f"{EXPERTS} --moe-layer-freq ([0]*3+[1]*29) --moe-shared-expert-intermediate-size 512",
         {"dense_layers": 3, "shared_width": 512}),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", {"dispatcher": "DeepEP"}),
        (f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
         {"dispatcher": "HybridEP"}),
        (f"{EXPERTS} --overlap-moe-expert-parallel-comm --moe-expert-capacity-factor 1.0 "
         "--moe-router-force-load-balancing",
         {"notes": "all-to-all overlap; force-balanced; token drop"}),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router",
         {"notes": "CUDA graphs of attention and router"}),
        ("--cuda-graph-impl local", {"notes": "CUDA graphs"}),
        (LATENT, {"query_rank": 0, "key_rank": 32, "rope_dim": 64, "head_dim": 128}),
        (f"{LATENT} --q-lora-rank 1536 --kv-lora-rank 512 --qk-pos-emb-head-dim 32",
         {"query_rank": 1536, "key_rank": 512, "rope_dim": 32}),
        ("--overlap-grad-reduce --overlap-param-gather", {"not_overlapped": ""}),
        ("", {"not_overlapped": "scatters sums gathers"}),
        (f"--overlap-grad-reduce --overlap-param-gather {VIRTUAL} --no-overlap-p2p-communication",
         {"not_overlapped": "stages"}),
        ("--cross-entropy-loss-fusion", {"loss_bytes": 10}),
        ("--context-parallel-size 2 --cp-comm-type all_gather", {"cp_comm": "all_gather"}),
        # Stages: layers that predict ahead are on the last one; ends may count as layers.
        ("", {"pp_layout": ""}),
        ("--mtp-num-layers 1", {"mtp_layers": 1, "pp_layout": f"E{16 * 't'}|{16 * 't'}mL"}),
        ("--decoder-first-pipeline-num-layers 20", {"pp_layout": f"E{20 * 't'}|{12 * 't'}L"}),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
         "--num-layers-per-virtual-pipeline-stage 17", {"pp_layout": f"E{16 * 't'}|{16 * 't'}L"}),
        ("--pipeline-model-parallel-layout Et*20|t*12L",
         {"pp_layout": f"E{20 * 't'}|{12 * 't'}L"}),
    ],
)  # fmt: skip
def test_flags_are_the_row_that_is_priced(more, cells):
    row = row_of(run_of(more), {}, "", "H100")
    assert {name: row[name] for name in cells} == cells


def test_a_row_without_sizes_is_not_priced():
    bare = Run(flags=parse_flags("--micro-batch-size 1"), num_devices=8, model={})
    with pytest.raises(PlannerError, match="give --model, or --num-layers and --hidden-size"):
        row_of(bare, {}, "", "H100")


def test_parts_of_a_named_model_are_its_own_unless_the_line_states_them():
    row = row_of(run_of("--disable-bias-linear"), {"vocab": 128256}, "llama-3-8b", "H100")
    assert row["bias"] == 0
    assert not {"norm", "positions", "tied", "dropout", "vocab_multiple"} & set(row)


@pytest.mark.parametrize(
    ("more", "notes"),
    [
        ("", []),
        ("--sequence-parallel",
         ["--sequence-parallel: Megatron-LM switches it off without tensor parallelism"]),
        ("--num-query-groups 8",
         ["--num-query-groups: without --group-query-attention it is not read"]),
        ("--tokenizer-type GPTSentencePieceTokenizer",
         ["assumed: the vocabulary of --tokenizer-type GPTSentencePieceTokenizer is not known; "
          "give --vocab-size, which changes the embedding, the output matrix and the logits"]),
        ("--fp8-format hybrid",
         ["assumed: weights are kept in 8 bits; without --fp8-param-gather copies of them are "
          "added, of up to 2 bytes a parameter"]),
        ("--fp8-format hybrid --fp8-param-gather", []),
    ],
)  # fmt: skip
def test_what_is_assumed_is_said(more, notes):
    assert notes_of(run_of(more)) == notes


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "without --bf16 or --fp16 Megatron-LM trains in fp32"),
        ("--bf16 --optimizer-cpu-offload", "--optimizer-cpu-offload: what lies in the host's"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe custom", "--fp8-recipe custom: a recipe of your"),
        (f"--bf16 {LATENT} --v-head-dim 64", "--v-head-dim 64 with --qk-head-dim 128"),
        ("--bf16 --multi-latent-attention", "--position-embedding-type rope alone"),
        ("--bf16 --position-embedding-type relative", "relative: it is not priced"),
        ("--bf16 --transformer-impl inference_optimized", "optimized: it is not priced"),
        ("--bf16 --context-parallel-size 2 --cp-comm-type a2a", "--cp-comm-type a2a: keys and"),
        ("--bf16 --context-parallel-size 2 --attention-backend unfused", "that is not fused"),
        (f"--bf16 {EXPERTS} --moe-layer-freq 2", "--moe-layer-freq 2: priced where first layers"),
        (f"--bf16 {EXPERTS} --moe-layer-freq [1]*3", "[1]*3: priced where first layers"),
        (f"--bf16 {EXPERTS} --moe-expert-capacity-factor 2", "factor 2: priced with all rows"),
        (f"--bf16 {EXPERTS} --expert-tensor-parallel-size 4", "4: priced where it is 1 or"),
        ("--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
         "chunks of several layers are not priced"),
        ("--bf16 --recompute-granularity selective --recompute-modules mhc", "modules mhc: priced"),
        ("--bf16 --use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping: over nodes"),
    ],
)  # fmt: skip
def test_what_is_not_priced_is_refused_by_name(more, told):
    found = refusals(run_of(more))
    assert [text for text in found if told in text], found


def test_scripts_of_other_models_are_refused():
    line = f"torchrun --nproc-per-node 8 /opt/megatron/pretrain_mamba.py {FLAGS} --bf16"
    assert refusals(run_of(flags=line)) == [
        "pretrain_mamba.py: layers of other kinds are not priced"
    ]
    assert not refusals(run_of(flags=line.replace("mamba", "gpt")))


def test_experts_that_a_few_tp_ranks_share_are_priced_whole():
    line = (
        f"--bf16 {EXPERTS} --tensor-model-parallel-size 4 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 2 --sequence-parallel"
    )
    row = row_of(run_of(line), {}, "", "H100")
    assert (row["ep"], row["etp"]) == (4, 1)
    assert any("whole experts on 4 ranks" in note for note in notes_of(run_of(line)))
    assert refusals(run_of(line.replace("--num-experts 8", "--num-experts 2")))


def test_bert_and_t5_are_other_rows():
    of_bert = row_of(run_of(flags=f"pretrain_bert.py {FLAGS} --bf16"), {}, "", "H100")
    assert (of_bert["sees_all"], of_bert["transforms_head"]) == (1, 1)
    assert of_bert["vocab"] == 30522
    line = (
        f"pretrain_t5.py {FLAGS} --bf16 --encoder-num-layers 3 --decoder-num-layers 5 "
        "--encoder-seq-length 512 --decoder-seq-length 128 --vocab-extra-ids 100"
    )
    of_t5 = row_of(run_of(flags=line), {}, "", "H100")
    assert {name: of_t5[name] for name in ("layers", "seq_len", "vocab")} == {
        "layers": 5, "seq_len": 128, "vocab": 30622,
    }  # fmt: skip
    assert (of_t5["encoder_layers"], of_t5["encoder_seq_len"]) == (3, 512)
    told = refusals(run_of(flags=f"{line} --pipeline-model-parallel-size 2"))
    assert told == [
        "--pipeline-model-parallel-size 2: an encoder beside a decoder is priced with 1"
    ]


def test_refused_options_with_values_that_say_nothing_are_sound():
    line = "--bf16 --optimizer adam --main-grads-dtype fp32 --cpu-offloading-num-layers 0"
    assert not refusals(run_of(line))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", (True, True, True)),
        ("2", (True, False, True)),
        ("([0]*2+[1])", (False, False, True)),
        ("[0,1,1]", (False, True, True)),
        ("([1]*999999999999)", None),
        ("[1]*2", None),
        ("__import__('os')", None),
        ("[2,1,1]", None),
        ("0", None),
        ("[", None),
    ],
)  # fmt: skip
def test_layers_with_experts(text, layers):
    assert layers_with_experts(text, 3) == layers


def test_modules_whose_recomputation_is_priced_are_those_of_rows():
    assert set(RECOMPUTED) == set(RECOMPUTED_MODULES)


SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16"
)


def test_learned_positions_on_context_parallel_ranks_are_priced():
    """They ended in a message about an op of the embedding."""
    more = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    assert peak_gib(more, gpus=4, flags=SMALL) > 0


def test_fewer_query_groups_than_tensor_parallel_ranks_are_priced():
    more = "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4"
    assert transformer_of(parsed(more, gpus=4, flags=SMALL)).kv_heads == 4
    assert peak_gib(more, gpus=4, flags=SMALL) > 0
    (note,) = notes_of(run_of(more, 4, SMALL))
    assert "a head of keys and values on each of 4 tensor-parallel ranks" in note


def test_microbatches_that_are_no_multiple_of_the_ranks_keep_virtual_stages():
    line = SMALL.replace("batch-size 16", "batch-size 5")
    more = (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3"
    )
    assert planned(more, gpus=2, flags=line).vpp == 2
    assert peak_gib(more, gpus=2, flags=line) > 0


def test_block_recomputes_the_first_layers_of_each_stage():
    more = (
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers "
    )
    stages = [stage.recompute_by_block for stage in planned(f"{more}1", gpus=2, flags=SMALL).stages]
    # The embedding and the head recompute nothing, whatever is said of them.
    assert stages == [("selective", "selective", "none"), ("selective", "none", "selective")]
    peaks = [peak_gib(f"{more}{n}", gpus=2, flags=SMALL) for n in (1, 2)]
    assert peaks[0] > peaks[1]


def test_flags_that_change_memory_change_its_price():
    base = peak_gib("", gpus=2, flags=SMALL)
    unfused = peak_gib("--attention-backend unfused", gpus=2, flags=SMALL)
    # Weights of attention, and what is left of them by dropout, of 8 heads in 4 layers.
    assert unfused > base + 4 * 8 * 512**2 * 2 / 2**30
    assert peak_gib("--grad-reduce-in-bf16", gpus=2, flags=SMALL) != base
    assert peak_gib("--mtp-num-layers 1", gpus=2, flags=SMALL) > base
    assert peak_gib("--vocab-size 1000", gpus=2, flags=SMALL) < base


AWARE = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("more", "bytes_of_a_weight"),
    [
        # Two moments, and what bf16 weights lack of fp32 or all of it; sums of gradients.
        ("--bf16 --use-distributed-optimizer", 4 + 4 + 4),
        (AWARE, 4 + 4 + 2),
        (f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 2 + 2 + 2),
        (f"{AWARE} --exp-avg-dtype fp8", 1 + 4 + 2),
        (
            f"{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16",
            1 + 2 + 2,
        ),
        (f"{AWARE} --fp8-format hybrid --fp8-recipe tensorwise", 4 + 4 + 4),
        (
            f"{AWARE} --fp8-format hybrid --fp8-recipe tensorwise --main-params-dtype fp16",
            4 + 4 + 2,
        ),
        (f"{AWARE} --fp8-format hybrid", 4 + 4 + 2),
        (f"{AWARE.replace('--bf16', '--fp16')} --accumulate-allreduce-grads-in-fp32", 4 + 4 + 4),
    ],
)
def test_a_precision_aware_optimizer_keeps_as_many_bytes_as_flags_say(more, bytes_of_a_weight):
    run = run_of(more, 2, SMALL)
    assert not broken_rules(run)
    assert not refusals(run)

    def kept(flags: str) -> float:
        row = row_of(run_of(flags, 2, SMALL), {}, "", "H100")
        priced = price_row({name: str(value) for name, value in row.items()})
        return float(priced.estimate.memory[0].optimizer_bytes)

    # (Counters of the steps, 4 bytes a tensor, are no part of it.)
    usual = kept("--bf16 --use-distributed-optimizer")
    assert kept(more) / usual == pytest.approx(bytes_of_a_weight / 12, rel=1e-4)


def test_narrow_sums_of_gradients_are_those_of_their_flag():
    narrow = parsed(f"{AWARE} --main-grads-dtype bf16", gpus=2, flags=SMALL).stack
    assert (narrow.gradient_bytes, narrow.reduced_bytes) == (2, 2)
    assert parsed(AWARE, gpus=2, flags=SMALL).stack.gradient_bytes == 4
    fsdp = run_of(f"{AWARE} --use-megatron-fsdp", 2, SMALL)
    assert "Megatron-FSDP's optimizer is priced in fp32 alone" in " ".join(refusals(fsdp))


def test_shared_experts_of_a_width_of_their_own():
    model = transformer_of(parsed(f"{EXPERTS} --moe-shared-expert-intermediate-size 512", gpus=16))
    assert model.experts is not None
    assert model.experts.width_of_shared == 512


def test_latent_attention_is_priced_as_such():
    """A run that took 56 GiB was priced at 19 (gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed)."""
    line = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --disable-bias-linear "
        "--use-distributed-optimizer --attention-backend unfused --micro-batch-size 4 "
        "--global-batch-size 32 --seq-length 4096 --num-layers 16 --moe-layer-freq ([0]+[1]*15) "
        "--pipeline-model-parallel-layout Et*2|(tt|)*6ttmL --hidden-size 1024 "
        "--ffn-hidden-size 4096 --num-attention-heads 32 --max-position-embeddings 4096 "
        "--position-embedding-type rope --make-vocab-size-divisible-by 3232 "
        "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights "
        "--multi-latent-attention --mtp-num-layers 1 --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --qk-layernorm --num-experts 32 --moe-ffn-hidden-size 1024 "
        "--moe-shared-expert-intermediate-size 1024 --moe-router-topk 4 "
        "--moe-token-dispatcher-type alltoall --q-lora-rank 1536 --kv-lora-rank 512"
    )
    assert 54 < peak_gib("", gpus=8, flags=line) < 60


@pytest.mark.parametrize(
    "more",
    [
        "--mtp-num-layers 2 --context-parallel-size 2",
        "--group-query-attention --num-query-groups 2 --attention-backend unfused",
        "--group-query-attention --num-query-groups 1 --attention-backend unfused",
        "--hidden-dropout 0.1 --context-parallel-size 2",
    ],
)
def test_parts_that_meet_are_priced(more):
    """Each pair ended in a message about an op."""
    both = f"{more} --tensor-model-parallel-size 2 --sequence-parallel"
    assert peak_gib(both, gpus=4, flags=SMALL) > 0
