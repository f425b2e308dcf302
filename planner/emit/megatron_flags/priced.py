"""Options that are priced: what of a price follows from each.

Names and values: see `planner.emit.megatron_flags`. Where a value of one is not priced, a rule of
`planner.emit.megatron_refusals` says so.
"""

from __future__ import annotations

PRICED: dict[str, dict[str, str]] = {
    "sizes of the model": {
        "int": (
            "num-layers encoder-num-layers hidden-size ffn-hidden-size num-attention-heads "
            "num-query-groups kv-channels seq-length encoder-seq-length max-position-embeddings "
            "mtp-num-layers decoder-num-layers decoder-seq-length"
        ),
        "": "group-query-attention swiglu quick-geglu bert-no-binary-head",
    },
    "parts of a layer": {
        "": (
            "untie-embeddings-and-output-weights disable-bias-linear qk-layernorm qk-l2-norm "
            "use-rotary-position-embeddings"
        ),
        "str": "normalization position-embedding-type",
        "float": "hidden-dropout attention-dropout",
    },
    "latent attention": {
        "": "multi-latent-attention",
        "int": "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim",
    },
    "experts": {
        "int": (
            "num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size"
        ),
        "str": "moe-layer-freq moe-token-dispatcher-type moe-flex-dispatcher-backend",
        "": (
            "moe-enable-deepep moe-router-force-load-balancing overlap-moe-expert-parallel-comm "
            "moe-shared-expert-overlap moe-pad-expert-input-to-capacity moe-grouped-gemm"
        ),
        "float": "moe-expert-capacity-factor",
    },
    "the vocabulary": {
        "int": "vocab-size padded-vocab-size make-vocab-size-divisible-by vocab-extra-ids",
        "": "no-pad-vocab-size disable-pad-vocab-size",
        "str": "tokenizer-type tokenizer-model",
    },
    "how devices share the model": {
        "int": (
            "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
            "expert-model-parallel-size expert-tensor-parallel-size"
        ),
        "": ("sequence-parallel use-distributed-optimizer use-megatron-fsdp use-tp-pp-dp-mapping"),
        "str": "data-parallel-sharding-strategy",
        "str+": "cp-comm-type",
    },
    "stages and their schedule": {
        "int": (
            "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
            "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
            "microbatch-group-size-per-virtual-pipeline-stage"
        ),
        "": "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        "str": "pipeline-model-parallel-layout",
    },
    "the batch": {
        "int": "micro-batch-size global-batch-size",
        "": "no-create-attention-mask-in-dataloader",
    },
    "what is recomputed": {
        "": "recompute-activations moe-layer-recompute",
        "str": "recompute-granularity recompute-method",
        "int": "recompute-num-layers",
        "str+": "recompute-modules",
    },
    "dtypes": {
        "": "bf16 fp16 grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 fp8-param-gather",
        "str": "fp8-format fp8-recipe fp4-format fp4-recipe",
    },
    "what the optimizer keeps": {
        "": "use-precision-aware-optimizer",
        "str": "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
    },
    "which kernels run": {
        "": (
            "use-flash-attn enable-cuda-graph external-cuda-graph cross-entropy-loss-fusion "
            "deterministic-mode no-masked-softmax-fusion attention-softmax-in-fp32 "
            "apply-query-key-layer-scaling"
        ),
        "str": "attention-backend transformer-impl cuda-graph-impl cross-entropy-fusion-impl",
        "str+": "cuda-graph-modules cuda-graph-scope",
    },
    "what runs beside compute": {
        "": "overlap-grad-reduce overlap-param-gather no-overlap-p2p-communication",
    },
    "a rule that options hold to, and not the price itself": {
        "": "tp-comm-overlap",
        "str": "ckpt-format",
    },
}
"""Names of options by what their values are, by what of a price follows from them."""

CHOICES: dict[str, tuple[str, ...]] = {
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "fp4-format": ("e2m1",),
    "main-grads-dtype": ("fp32", "bf16"),
    "main-params-dtype": ("fp32", "fp16"),
    "exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "fp4-recipe": ("nvfp4", "custom"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "moe-flex-dispatcher-backend": ("deepep", "hybridep", "ncclep"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "transformer-impl": ("local", "transformer_engine", "inference_optimized"),
    "cuda-graph-impl": ("none", "local", "transformer_engine", "full_iteration"),
    "cross-entropy-fusion-impl": ("native", "te"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
}
"""Values that an option may have, where these are few."""

MAY_BE_ZERO = frozenset(
    {"num-experts", "mtp-num-layers", "moe-shared-expert-intermediate-size", "q-lora-rank"}
)
"""Whole numbers that may be 0; others are at least 1."""
