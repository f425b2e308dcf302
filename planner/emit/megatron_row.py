"""A line of Megatron-LM's flags as a row of numbers, which is priced (docs/estimate-rows.md).

Of a model that is named beside the line, parts that the line does not state are the model's; of a
line alone they are what Megatron-LM does by default.
"""

from __future__ import annotations

import re
from typing import Any

from planner.emit.megatron_options import stages_of_layout
from planner.emit.megatron_refusals import is_rotary, is_unfused, layers_with_experts
from planner.emit.megatron_rules import Run
from planner.errors import PlannerError

OPTION_OF = {
    "layers": "num-layers",
    "hidden": "hidden-size",
    "heads": "num-attention-heads",
    "kv_heads": "num-query-groups",
    "ffn_hidden": "ffn-hidden-size",
    "seq_len": "seq-length",
    "num_experts": "num-experts",
    "experts_per_token": "moe-router-topk",
    "vocab": "vocab-size",
}
"""Megatron-LM's option for each column of a row that is a size of the model."""

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 131072,
}
"""Tokens of the vocabularies that a kind of tokenizer has where nothing else is said: those of the
files that their authors published; TikTokenizer's is Megatron-LM's default
(megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py)."""

VOCABULARIES_BY_NAME = (
    (r"llama-?3", 128256),
    (r"llama-?2", 32000),
    (r"mi[sx]tral.*v0\.1", 32000),
    (r"qwen-?3", 151669),
    (r"qwen-?2\.5", 151665),
    (r"gpt-?2", 50257),
    (r"nemotron.*256k", 256000),
)
"""Tokens of the vocabularies that well-known names of --tokenizer-model have, added ones among
them, from the files that their authors published (tokenizer.json of the model cards)."""

USUAL_TOKENIZER = "GPT2BPETokenizer"
"""Of pretrain_gpt.py, where a line names none; BertWordPieceLowerCase of pretrain_bert.py and
pretrain_t5.py."""

MOMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of an element of a moment of Adam's, by its dtype."""

FUSED_LOSS_BYTES = 10
"""Memory of a logit in a loss that one kernel computes: two copies in fp32, as exponentials are
written beside the logits and not over them. Told by gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion
of Megatron-LM's tests, which has 4 bytes a logit more than the same run without, on H100 and GB200
(8 on A100 with newer software)."""

USUAL_DROPOUT = 0.1
"""Of --hidden-dropout and --attention-dropout."""


def row_of(run: Run, columns: dict[str, int], model: str, gpu: str) -> dict[str, Any]:
    """Return the run as a row of numbers."""
    named = model if columns and not model.endswith(".py") and "=" not in model else ""
    stack = "megatron-local" if run.word("transformer-impl") == "local" else "megatron-core"
    row: dict[str, Any] = {"stack": stack, "gpu": gpu, "model": named, **columns}
    row |= _sizes(run)
    if not row.get("layers") or not row.get("hidden"):
        raise PlannerError(
            "no rule is broken; to price the flags give --model, or --num-layers and --hidden-size"
        )
    row |= _parts(run, has_model=bool(model))
    row |= _ffn(run, row)
    row |= _experts(run) | _latent(run) | _vocabulary(run, row)
    return row | _layout(run) | _runtime(run)


def notes_of(run: Run) -> list[str]:
    """Return, a line each, what Megatron-LM makes of a line beside what it says, and what a price
    takes for what it does not say.
    """
    notes = []
    if run.has("sequence-parallel") and run.tp == 1:
        notes.append("--sequence-parallel: Megatron-LM switches it off without tensor parallelism")
    if run.has("num-query-groups") and not run.has("group-query-attention"):
        notes.append("--num-query-groups: without --group-query-attention it is not read")
    if run.has_experts and run.cuts_some:
        notes.append(
            f"--expert-tensor-parallel-size {run.etp}: priced as whole experts on "
            f"{run.ep * run.etp} ranks, which multiply as much and take fewer rows each"
        )
    if run.is_bert and not run.has("bert-no-binary-head"):
        notes.append(
            "priced without BERT's head that tells whether two sentences follow each other"
        )
    if 0 < run.query_groups < run.tp and not run.has("multi-latent-attention"):
        notes.append(
            f"priced with a head of keys and values on each of {run.tp} tensor-parallel ranks, and "
            f"without the gather that shares {run.query_groups} groups among them: its weights are "
            "a little too large, a step a little too short"
        )
    if run.has("fp8-format") and not run.has("fp8-param-gather"):
        notes.append(
            "assumed: weights are kept in 8 bits; without --fp8-param-gather copies of them are "
            "added, of up to 2 bytes a parameter"
        )
    if "vocab" not in _vocabulary(run, {}) and "vocab-size" not in run.model:
        kind = run.word("tokenizer-type")
        notes.append(
            f"assumed: the vocabulary of --tokenizer-type {kind} is not known; give --vocab-size, "
            "which changes the embedding, the output matrix and the logits"
        )
    return notes


def _sizes(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {
        column: run.flags.number(option, 0)
        for column, option in OPTION_OF.items()
        if run.has(option) and column not in ("kv_heads", "vocab")
    }
    row |= {"layers": run.layers} if run.layers else {}
    row |= {"seq_len": run.seq_len} if run.seq_len else {}
    if run.has("group-query-attention"):
        row["kv_heads"] = run.query_groups
    if run.has("swiglu") or run.has("quick-geglu"):
        row["gated_ffn"] = 1
    if run.is_t5:
        row["encoder_layers"] = run.number("encoder-num-layers") or run.number("num-layers")
        row["encoder_seq_len"] = run.number("encoder-seq-length") or run.number("seq-length")
    if run.is_bert:
        row |= {"sees_all": 1, "transforms_head": 1}
    if run.number("kv-channels"):
        row["head_dim"] = run.number("kv-channels")
    if run.has("mtp-num-layers"):
        row["mtp_layers"] = run.number("mtp-num-layers")
    if run.number("max-position-embeddings"):
        row["max_positions"] = run.number("max-position-embeddings")
    return row


def _ffn(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """Return the width of a feed-forward: Megatron-LM's usual one where nothing says."""
    if row.get("ffn_hidden") or row.get("model"):
        return {}
    hidden = row["hidden"]
    # Two thirds of 4 * hidden in three matrices are as many weights; a multiple of 64.
    usual = 64 * int(4 * hidden * 2 / 3 / 64) if run.has("swiglu") else 4 * hidden
    return {"ffn_hidden": usual}


def _parts(run: Run, *, has_model: bool) -> dict[str, Any]:
    """Return parts of layers, and of the ends, that a line states, or that are usual without a
    model of its own.
    """
    row: dict[str, Any] = {}
    is_usual = not has_model
    if is_usual:
        row["gated_ffn"] = int(run.has("swiglu") or run.has("quick-geglu"))
    if is_usual and run.number("num-attention-heads"):
        row["kv_heads"] = run.query_groups or run.number("num-attention-heads")
    if run.has("normalization") or is_usual:
        row["norm"] = "rms" if run.word("normalization") == "RMSNorm" else "layer"
    if run.has("position-embedding-type") or is_rotary(run) or is_usual:
        kind = run.word("position-embedding-type")
        row["positions"] = "rotary" if is_rotary(run) else "none" if kind == "none" else "learned"
    if run.has("disable-bias-linear") or is_usual:
        row["bias"] = int(not run.has("disable-bias-linear"))
    if run.has("untie-embeddings-and-output-weights") or is_usual:
        row["tied"] = int(not run.has("untie-embeddings-and-output-weights"))
    if run.has("qk-layernorm") or run.has("qk-l2-norm"):
        row["qk_norm"] = 1
    given = [name for name in ("hidden-dropout", "attention-dropout") if run.has(name)]
    if given or is_usual:
        parts = [
            run.flags.values.get(name, USUAL_DROPOUT)
            for name in ("hidden-dropout", "attention-dropout")
        ]
        row["dropout"] = int(any(parts))
    return row


def _experts(run: Run) -> dict[str, Any]:
    if run.number("num-experts") <= 1:
        return {}
    row: dict[str, Any] = {}
    if run.flags.number("num-experts", 0) > 1 and not run.has("moe-router-topk"):
        row["experts_per_token"] = run.number("moe-router-topk", 2)
    if run.number("moe-ffn-hidden-size"):
        row["ffn_hidden"] = run.number("moe-ffn-hidden-size")
    if run.has("moe-shared-expert-intermediate-size"):
        row["shared_width"] = run.number("moe-shared-expert-intermediate-size")
    if run.has("moe-layer-freq"):
        layers = layers_with_experts(run.word("moe-layer-freq"), run.layers) or ()
        row["dense_layers"] = layers.count(False)
    if run.flags.number("num-experts", 0) > 1:
        # Of layers without experts, whose width the line gives apart or both have.
        row["dense_ffn"] = (
            run.number("ffn-hidden-size")
            or (_ffn(run, {"hidden": run.number("hidden-size")})["ffn_hidden"])
        )
    if run.ep > 1 or run.tp > 1:
        row["etp"] = 1 if run.cuts_some else run.etp
    row["grouped_experts"] = int(run.has("moe-grouped-gemm"))
    return row | {"dispatcher": _dispatcher(run)}


def _dispatcher(run: Run) -> str:
    kind = run.word("moe-token-dispatcher-type") or "allgather"
    if kind == "flex":
        return "HybridEP" if run.word("moe-flex-dispatcher-backend") == "hybridep" else "DeepEP"
    return "DeepEP" if run.has("moe-enable-deepep") else kind


def _latent(run: Run) -> dict[str, Any]:
    if not run.has("multi-latent-attention"):
        return {}
    return {
        "query_rank": run.number("q-lora-rank"),
        "key_rank": run.number("kv-lora-rank", 32),
        "rope_dim": run.number("qk-pos-emb-head-dim", 64),
        "head_dim": run.number("qk-head-dim", 128),
        "kv_heads": run.number("num-attention-heads"),
    }


def _vocabulary(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """Return the vocabulary and what it is padded to; no vocabulary where nothing tells it."""
    multiple = {"vocab_multiple": run.number("make-vocab-size-divisible-by", 128)}
    if run.number("padded-vocab-size"):
        return {"vocab": run.number("padded-vocab-size"), "vocab_multiple": 1}
    if run.has("no-pad-vocab-size") or run.has("disable-pad-vocab-size"):
        multiple = {"vocab_multiple": 1}
    if run.has("vocab-size"):
        return {"vocab": run.number("vocab-size")} | multiple
    if row.get("vocab") or row.get("model"):
        # A model's own vocabulary, as it is: what it is padded to stands in the line.
        return multiple if run.has("make-vocab-size-divisible-by") else {}
    known = _known_vocabulary(run)
    return ({"vocab": known} if known else {}) | multiple


def _known_vocabulary(run: Run) -> int:
    """Return the tokens that a well-known tokenizer has; 0 where it is none."""
    usual = "BertWordPieceLowerCase" if run.is_bert or run.is_t5 else USUAL_TOKENIZER
    kind, model = run.word("tokenizer-type") or usual, run.word("tokenizer-model")
    if kind in ("HuggingFaceTokenizer", "SFTTokenizer", "GPTSentencePieceTokenizer"):
        named = (n for words, n in VOCABULARIES_BY_NAME if re.search(words, model, re.I))
        return next(named, 0)
    # (Words that stand for parts left out are added to these alone.)
    more = run.number("vocab-extra-ids") if kind.startswith("BertWordPiece") else 0
    return VOCABULARIES[kind] + more if kind in VOCABULARIES else 0


def _layout(run: Run) -> dict[str, Any]:
    return {
        "gpus": run.num_devices,
        "tp": run.tp,
        "pp": run.pp,
        "cp": run.cp,
        "dp": run.dp,
        "vpp": run.vpp,
        "schedule": "interleaved" if run.vpp > 1 else "1F1B",
        "pp_layout": pipeline_layout(run),
        "microbatch_group": run.number("microbatch-group-size-per-virtual-pipeline-stage"),
        # Where a few tp ranks share an expert, they are priced with whole experts: as many weights.
        "ep": run.ep * run.etp if run.has_experts and run.cuts_some else run.ep,
        "sp": int(run.sequence_parallel),
        "micro_batch": run.number("micro-batch-size"),
        "global_batch": run.number("global-batch-size") or run.number("micro-batch-size") * run.dp,
        "zero_stage": _zero_stage(run),
    }


def pipeline_layout(run: Run) -> str:
    """Return the blocks of each stage in Megatron-LM's notation; empty without a pipeline, and
    where all stages have as many layers.
    """
    given = run.word("pipeline-model-parallel-layout")
    if run.pp == 1:
        return ""
    if given:
        return "|".join(stages_of_layout(given))
    first = run.number("decoder-first-pipeline-num-layers")
    last = run.number("decoder-last-pipeline-num-layers")
    ahead = run.number("mtp-num-layers")
    if run.split_layers == run.layers and not (first or last or ahead):
        return ""
    inner = run.pp - bool(first) - bool(last)
    each = (run.split_layers - first - last) // inner if inner else 0
    of_rank = [each] * run.pp
    of_rank[0] = first or each
    of_rank[-1] = last or each
    stages = ["t" * (of_rank[s % run.pp] // run.vpp) for s in range(run.pp * run.vpp)]
    if run.has("account-for-embedding-in-pipeline-split"):
        stages[0] = stages[0][1:]
    if run.has("account-for-loss-in-pipeline-split"):
        stages[-1] = stages[-1][1:]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "m" * ahead + "L"
    return "|".join(stages)


def _runtime(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {"recompute": _recompute(run), "dtype": _dtype(run)}
    if run.word("recompute-method") == "block":
        row["recompute_layers"] = run.number("recompute-num-layers")
    names_flash = run.has("use-flash-attn") or run.word("attention-backend") == "flash"
    row["attention"] = "unfused" if is_unfused(run) else "flash" if names_flash else "fused"
    # A softmax that no kernel fuses, of layers of Megatron-LM's own (fusions/fused_softmax.py).
    in_fp32 = run.has("attention-softmax-in-fp32") or run.has("apply-query-key-layer-scaling")
    if run.word("transformer-impl") == "local" and run.has("no-masked-softmax-fusion") and in_fp32:
        row["wide_softmax"] = 1
    if run.has("deterministic-mode"):
        row["deterministic"] = 1
    if not (run.has("no-create-attention-mask-in-dataloader") or run.is_bert or run.is_t5):
        row["masks_batch"] = 1
    if run.has("tp-comm-overlap"):
        row["cut_products"] = 1
    if run.has("cross-entropy-loss-fusion"):
        row["loss_bytes"] = FUSED_LOSS_BYTES
    if run.cp > 1:
        row["cp_comm"] = run.word("cp-comm-type") or "p2p"
    # In bf16 sums are in fp32, whether the line says so or not.
    is_narrow = run.has("grad-reduce-in-bf16") if run.has("bf16") else (
        not run.has("accumulate-allreduce-grads-in-fp32")
    )  # fmt: skip
    is_narrow = is_narrow or run.word("main-grads-dtype") == "bf16"
    row["gradient_bytes"] = 2 if is_narrow and not run.has("use-megatron-fsdp") else 4
    row |= _optimizer(run)
    row["not_overlapped"] = " ".join(_not_overlapped(run))
    row["notes"] = "; ".join(_said(run))
    return row


def _optimizer(run: Run) -> dict[str, Any]:
    """Return the bytes of what a precision-aware optimizer keeps for each weight.

    Transformer Engine's FusedAdam keeps of bf16 weights what they lack of fp32, 2 bytes
    (store_param_remainders, megatron/core/optimizer/__init__.py). Where weights are in 8 bits under
    another recipe than delayed scaling, Megatron-LM keeps whole fp32 ones of its own.
    """
    if not run.has("use-precision-aware-optimizer"):
        return {}
    widths = [
        MOMENT_BYTES[run.word(name) or "fp32"] for name in ("exp-avg-dtype", "exp-avg-sq-dtype")
    ]
    is_own = run.has("fp8-format") and run.word("fp8-recipe") not in ("", "delayed")
    is_narrow = run.word("main-params-dtype") == "fp16" or (run.has("bf16") and not is_own)
    return {"moment_bytes": " ".join(map(str, widths)), "master_bytes": 2 if is_narrow else 4}


def _not_overlapped(run: Run) -> list[str]:
    """Return what does not run beside compute, as a line says or leaves out."""
    if run.has("use-megatron-fsdp"):
        return []
    shown = []
    if not run.has("overlap-grad-reduce"):
        shown += ["scatters", "sums"]
    if not run.has("overlap-param-gather"):
        shown.append("gathers")
    # Without virtual stages Megatron-LM sends and receives in the way of compute in any case; what
    # the stack's rates make of that was fitted to such runs.
    if run.has("no-overlap-p2p-communication") and run.vpp > 1:
        shown.append("stages")
    return shown


def _said(run: Run) -> list[str]:
    """Return what a row says in words."""
    said = []
    if run.has("overlap-moe-expert-parallel-comm"):
        said.append("all-to-all overlap")
    if run.has("moe-shared-expert-overlap"):
        said.append("shared expert overlap")
    if run.has("moe-router-force-load-balancing"):
        said.append("force-balanced")
    if run.flags.values.get("moe-expert-capacity-factor") == 1.0:
        said.append("token drop")
    graphs = run.word("cuda-graph-impl") not in ("", "none")
    if graphs or run.has("enable-cuda-graph") or run.has("external-cuda-graph"):
        modules = run.word("cuda-graph-modules") or run.word("cuda-graph-scope")
        parts = [
            name
            for name, module in (("attention", "attn"), ("router", "moe_router"))
            if module in modules.split()
        ]
        if parts or not modules:
            said.append("CUDA graphs" + (f" of {' and '.join(parts)}" if parts else ""))
    return said


def _recompute(run: Run) -> str:
    kind = run.word("recompute-granularity")
    if kind == "full":
        return kind
    modules = run.word("recompute-modules").replace(",", " ").split()
    if run.has("recompute-activations") or kind == "selective":
        modules = modules or ["core_attn"]
    else:
        modules = []
    if run.has("moe-layer-recompute") and "moe" not in modules:
        modules.append("moe")
    return f"selective: {', '.join(modules)}" if modules else "none"


def _dtype(run: Run) -> str:
    if run.has("fp4-format"):
        return "nvfp4"
    if run.has("fp8-format"):
        recipe = run.word("fp8-recipe")
        return {
            "mxfp8": "mxfp8",
            "blockwise": "fp8 blockwise",
            "tensorwise": "fp8 current",
        }.get(recipe, "fp8")
    return "bf16" if run.has("bf16") else "fp16" if run.has("fp16") else "fp32"


def _zero_stage(run: Run) -> int:
    if run.has("use-megatron-fsdp"):
        strategy = run.word("data-parallel-sharding-strategy") or "optim_grads_params"
        return ("no_shard", "optim", "optim_grads", "optim_grads_params").index(strategy)
    return int(run.has("use-distributed-optimizer"))
