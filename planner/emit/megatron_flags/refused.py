"""Options that are refused by name: a price would be wrong, and there is none for them.

Names and values: see `planner.emit.megatron_flags`.
"""

from __future__ import annotations

_HOST = "what lies in the host's memory is not priced for Megatron-LM"
_LAYERS = "layers of other kinds are not priced"
_ELSEWHERE = "sizes and layout stand in another file; give them as flags"
_BYTES = "the state of Megatron-FSDP's optimizer is priced in fp32 alone"
_NARROW = "weights that are kept and gathered in 4 bits are not priced"
_OLD = "Megatron-LM takes it no longer; "
_IMAGES = "parts that see images are not priced"

REFUSED: dict[str, tuple[str, str, str]] = {
    # Kinds of models.
    "hybrid-layer-pattern": ("str", "", _LAYERS),
    "hybrid-override-pattern": ("str", "", _LAYERS),
    "is-hybrid-model": ("", "", _LAYERS),
    "spec": ("str*", "", _LAYERS),
    "heterogeneous-layers-config-path": ("str", "", _LAYERS),
    "heterogeneous-layers-config-encoded-json": ("str", "", _LAYERS),
    "experimental-attention-variant": ("str", "", _LAYERS),
    "linear-attention-freq": ("str", "", _LAYERS),
    "enable-mhc-connections": ("", "", "several residual streams are not priced"),
    "window-size": ("str", "", "attention within a window is not priced"),
    "attention-output-gate": ("", "", "a gate behind attention is not priced"),
    "moe-latent-size": ("int", "", "experts on a narrower stream are not priced"),
    "mtp-use-repeated-layer": ("", "", "layers that share their weights are not priced"),
    "vision-pretraining": ("", "", _IMAGES),
    "img-h": ("int", "", _IMAGES),
    "img-w": ("int", "", _IMAGES),
    "patch-dim": ("int", "", _IMAGES),
    "model-provider": ("str", "", "a model of another script is not priced"),
    "language-model-checkpoint": ("str", "", "a model of another script is not priced"),
    # Kinds of runs.
    "perform-rl-step": ("", "", "inference between steps is not priced"),
    "skip-train": ("", "", "a run that does not train is not priced"),
    "freeze-all-layers": ("", "", "a run that does not train is not priced"),
    "logits-load-dir": ("str", "", "distillation is not priced"),
    "logits-save-dir": ("str", "", "distillation is not priced"),
    "export-kd-teacher-load": ("str", "", "a teacher beside the model is not priced"),
    "step-batch-size-schedule": (
        "str", "", "priced with one batch; give --global-batch-size in its place",
    ),
    "use-checkpoint-args": ("", "", _ELSEWHERE),
    "use-mp-args-from-checkpoint-args": ("", "", _ELSEWHERE),
    "yaml-cfg": ("str", "", _ELSEWHERE),
    # How devices share the model.
    "use-torch-fsdp2": ("", "", "torch's FSDP2 is priced by `planner estimate`, stack fsdp-flash"),
    "num-distributed-optimizer-instances": ("int", "1", "shards in several copies are not priced"),
    "outer-dp-sharding-strategy": ("str", "no_shard", "shards in several copies are not priced"),
    "enable-full-sharding-in-hsdp": ("", "", "shards in several copies are not priced"),
    "hierarchical-context-parallel-sizes": ("int+", "", "two kinds of cp at once are not priced"),
    "hybrid-context-parallel": ("", "", "cp of another size for each sample is not priced"),
    "tensor-parallel-num-weight-shards": ("int", "1", "weights sharded beside tp are not priced"),
    "expert-tensor-parallel-num-weight-shards": (
        "int", "1", "weights sharded beside tp are not priced",
    ),
    "distribute-saved-activations": ("", "", "saved inputs split over tp are not priced"),
    # Memory that is elsewhere, or narrower.
    "optimizer-cpu-offload": ("", "", _HOST),
    "cpu-offloading-num-layers": ("int", "0", _HOST),
    "fine-grained-activation-offloading": ("", "", _HOST),
    "moe-paged-stash": ("", "", _HOST),
    "megatron-fsdp-main-params-dtype": ("str", "fp32", _BYTES),
    "megatron-fsdp-main-grads-dtype": ("str", "auto fp32", _BYTES),
    "megatron-fsdp-grad-comm-dtype": ("str", "auto fp32", _BYTES),
    "optimizer": ("str", "adam", "Adam alone is priced"),
    "fp4-param-gather": ("", "", _NARROW),
    "fp32-residual-connection": ("", "", "a stream of fp32 is not priced"),
    # Time.
    "first-last-layers-bf16": ("", "", "layers of several dtypes are not priced"),
    "te-precision-config-file": ("str", "", "layers of several dtypes are not priced"),
    "no-fp8-wgrad": ("", "", "products of several dtypes in a layer are not priced"),
    "disable-fp8-wgrad": ("", "", "products of several dtypes in a layer are not priced"),
    "fp8-output-proj": ("", "", "an output product in 8 bits is not priced"),
    "fp16-lm-cross-entropy": ("", "", "logits are priced with a copy in fp32"),
    "output-logit-dtype": ("str", "", "logits are priced with a copy in fp32"),
    "delay-wgrad-compute": ("", "", "gradients of weights that wait are not priced"),
    "overlap-dispatch-backward-with-experts-wgrad": (
        "", "", "gradients of weights that wait are not priced",
    ),
    "defer-embedding-wgrad-compute": ("", "", "gradients of weights that wait are not priced"),
    "moe-dispatch-fwd-dtype": ("str", "bf16", "rows of experts are priced in 16 bits alone"),
    "moe-combine-bwd-dtype": ("str", "bf16", "rows of experts are priced in 16 bits alone"),
    "moe-expert-rank-capacity-factor": ("float", "", "rows are priced as all or an even number"),
    "moe-router-force-biased": ("float", "", "a router that is made uneven is not priced"),
    "mlp-chunks-for-training": ("int", "1", "feed-forwards in chunks are not priced"),
    # No longer options.
    "batch-size": ("int", "", f"{_OLD}give --micro-batch-size"),
    "warmup": ("int", "", f"{_OLD}give --lr-warmup-fraction"),
    "model-parallel-size": ("int", "", f"{_OLD}give --tensor-model-parallel-size"),
    "checkpoint-activations": ("", "", f"{_OLD}give --recompute-activations"),
}  # fmt: skip
"""By name: what a value is, values (words apart) with which the option says nothing, and why it is
refused."""
