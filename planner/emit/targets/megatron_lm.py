"""Megatron-LM: flags of its training scripts, in a script that starts one node.

Ranks are numbered as in Megatron-LM's default order (tp, cp, dp, pp from the inside), so the same
ranks share a node. Sources, NVIDIA/Megatron-LM at d98e8a64ddf3 (2026-08-22):
megatron/training/arguments.py (flags and their rules), megatron/core/transformer/
pipeline_parallel_layer_layout.py (the language of cuts), transformer_config.py (recompute_modules,
cp_comm_type, fp8_recipe), pipeline_parallel/schedules.py (1F1B and its interleaved form); and
NVIDIA/TransformerEngine at d0067d0da6cb (2026-08-22), common/recipe (Float8CurrentScaling,
MXFP8BlockScaling).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import NODE_SETTINGS, headline, torchrun_lines
from planner.emit.view import PlanView, StageParts
from planner.language.plan import Plan
from planner.language.plan.parts import scaling_named
from planner.language.stacks.known import MEGATRON_BRIDGE, MEGATRON_LM
from planner.language.stacks.transformer_graph import Experts


def megatron_flags(view: PlanView) -> dict[str, str]:
    """Return the flags of a plan by name, "" for those that take no value."""
    plan = view.plan
    flags = _sizes(view)
    flags |= {
        "micro-batch-size": str(plan.microbatch_size),
        "global-batch-size": str(plan.global_batch),
        "tensor-model-parallel-size": str(plan.tp),
        "pipeline-model-parallel-size": str(plan.pp),
        "context-parallel-size": str(plan.cp),
    }
    # Megatron-LM trains experts on tp with it alone: where its layouts are accepted, with them.
    own_layouts = "layouts" in view.accepted and plan.tp > 1 and view.has_experts
    if view.sequence_parallel or own_layouts:
        flags["sequence-parallel"] = ""
    if plan.degrees["ep"] > 1:
        flags["expert-model-parallel-size"] = str(plan.degrees["ep"])
        flags["expert-tensor-parallel-size"] = str(plan.degrees["etp"])
        flags |= _dispatcher(plan)
    elif plan.tp > 1 and view.graph is not None and view.experts_on_tp == "whole":
        # Where nothing is said, tp cuts the experts' matrices as it cuts all others.
        flags["expert-tensor-parallel-size"] = "1"
    if plan.cp > 1:
        sent = {"gathered": "all_gather", "heads": "a2a", "ring": "p2p"}
        flags["cp-comm-type"] = sent[view.cp_kind()]
    if plan.pp > 1:
        flags["pipeline-model-parallel-layout"] = pipeline_layout(view.parts)
    flags |= _data_parallel(view)
    if view.trained_dtype == "bfloat16":
        flags["bf16"] = ""
    elif view.trained_dtype == "float16":
        # In fp16 sums are fp16 where nothing is said; the plan's are fp32.
        flags |= {"fp16": "", "accumulate-allreduce-grads-in-fp32": ""}
    if scaling := scaling_named(plan.precision):
        flags |= RECIPES[scaling]
    flags |= _recompute(view)
    if plan.optimizer_on_host:
        flags |= {
            "optimizer-cpu-offload": "",
            "optimizer-offload-fraction": "1.0",
            "use-precision-aware-optimizer": "",
        }
    return flags


RECIPES = {
    # A scale of the tensor at hand, gradients in e5m2.
    "tensorwise": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    # A scale of 32 neighbours, gradients in e4m3, too.
    "blocks": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
}
"""Flags of products in 8 bits, by what has a scale."""


def _dispatcher(plan: Plan) -> dict[str, str]:
    """Return what brings rows to experts: the dispatcher that a plan was priced with, of the first
    kind of its blocks; all-to-alls where nothing is told.
    """
    name = plan.estimate.get("experts", {}).get("dispatchers", ["alltoall"])[0]
    if name in ("deepep", "hybridep"):
        return {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": name}
    gathers = name in ("allgather", "gathered-rows")
    return {"moe-token-dispatcher-type": "allgather" if gathers else "alltoall"}


def pipeline_layout(parts: Sequence[StageParts]) -> str:
    """Return stages in Megatron-LM's language: ``Et*3|t*4|t*3L`` (E: embedding, t: layer, L: head).

    Equal stages that follow each other are written once: ``(t*4|)*6``.
    """
    texts = []
    for part in parts:
        count = len(part.layers)
        layers = "" if not count else "t" if count == 1 else f"t*{count}"
        texts.append("E" * part.embedding + layers + "L" * part.head)
    written = ""
    for text, run in groupby(texts[:-1]):
        times = len(list(run))
        # What is repeated is expanded before "t*4": a bracket may hold it.
        written += f"({text}|)*{times}" if times > 2 and text else f"{text}|" * times
    return written + texts[-1]


def _sizes(view: PlanView) -> dict[str, str]:
    sizes = view.sizes
    if sizes is None:
        return {}
    found = {
        "num-layers": sizes.layers,
        "hidden-size": sizes.hidden,
        "ffn-hidden-size": sizes.ffn_hidden,
        "num-attention-heads": sizes.heads,
        "seq-length": sizes.seq_len,
        "max-position-embeddings": sizes.seq_len,
    }
    flags = {name: str(size) for name, size in found.items() if size}
    if 0 < sizes.kv_heads < sizes.heads:
        flags |= {"group-query-attention": "", "num-query-groups": str(sizes.kv_heads)}
    if not sizes.tied:
        flags["untie-embeddings-and-output-weights"] = ""
    return flags | (_experts(sizes.experts) if sizes.experts else {})


def _experts(experts: Experts) -> dict[str, str]:
    flags = {
        "num-experts": str(experts.number),
        "moe-router-topk": str(experts.chosen),
        "moe-ffn-hidden-size": str(experts.hidden),
        "moe-grouped-gemm": "",
    }
    if experts.shared_hidden:
        flags["moe-shared-expert-intermediate-size"] = str(experts.shared_hidden)
    if not all(experts.layers):
        runs = [(has, len(list(run))) for has, run in groupby(experts.layers)]
        flags["moe-layer-freq"] = "+".join(f"[{int(has)}]*{count}" for has, count in runs)
    return flags


def _data_parallel(view: PlanView) -> dict[str, str]:
    stage = view.plan.zero_stage
    flags = {"overlap-grad-reduce": ""}
    if stage:
        flags |= {"use-distributed-optimizer": "", "overlap-param-gather": ""}
    if stage >= 2:
        strategy = "optim_grads" if stage == 2 else "optim_grads_params"
        flags |= {
            "use-megatron-fsdp": "",
            "data-parallel-sharding-strategy": strategy,
            "ckpt-format": "fsdp_dtensor",
        }
    return flags


def _recompute(view: PlanView) -> dict[str, str]:
    kind = "core attention" if "recompute" in view.accepted else view.recomputed[0]
    if "recompute" not in view.accepted and "by layer" in view.recomputed:
        return {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": str(view.first_layers_in_full),
        }
    if kind == "full":
        return {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": "1",
        }
    if kind == "core attention":
        return {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    return {}


WORDS = {
    "dp": "what is left of the world",
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size, --cp-comm-type",
    "ep": "--expert-model-parallel-size, --moe-token-dispatcher-type",
    "etp": "--expert-tensor-parallel-size",
    "microbatches": "--micro-batch-size, --global-batch-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "the stages of --pipeline-model-parallel-layout",
    "cuts": "--pipeline-model-parallel-layout",
    "schedule": "1F1B, interleaved with vpp",
    "zero": "1: --use-distributed-optimizer; 2, 3: --use-megatron-fsdp",
    "precision": "--bf16, or --fp16 --accumulate-allreduce-grads-in-fp32; fp8-tensorwise: "
    "--fp8-format hybrid, --fp8-recipe tensorwise; mxfp8: --fp8-format e4m3, --fp8-recipe mxfp8",
    "recompute": "--recompute-granularity full (the first layers of each stage: "
    "--recompute-method block), or selective of core_attn",
    "optimizer-on-host": "--optimizer-cpu-offload",
    "layouts": "its own, --sequence-parallel",
}
"""How Megatron-LM, and what is built on Megatron-Core, expresses the features of plans."""

INSTEAD = {
    "recompute": "selective recomputation of core attention",
    "layouts": "its own placements",
}
"""What it has of its own, where a user accepts that."""


def _write(view: PlanView) -> Emitted:
    flags = megatron_flags(view)
    notes = []
    if view.graph is None:
        notes.append("no model was given, so its sizes are left to you: --num-layers and the rest")
    else:
        latent = "--multi-latent-attention and its ranks, " if view.is_latent else ""
        experts = ""
        if view.has_experts:
            is_told = view.sizes is not None and view.sizes.experts is not None
            experts = "the router's scores and losses, " if is_told else "experts, "
        notes.append(
            f"what else describes the model is left to you: {latent}--swiglu, --normalization, "
            f"--position-embedding-type, {experts}the tokenizer"
        )
    lines = ["#!/usr/bin/env bash", *headline(view, "Megatron-LM")]
    lines += [f"# {note}" for note in notes]
    lines += [
        "# Run it in a Megatron-LM checkout: what you give it goes to the training script (data,",
        "# learning rate, the model's other sizes).",
        "set -euo pipefail",
        *NODE_SETTINGS,
    ]
    if view.plan.tp * view.plan.cp > 1 and view.plan.zero_stage < 2:
        lines += [
            "# One hardware queue keeps collectives in front of the products they overlap with",
            "# (GPUs before Blackwell). Megatron-FSDP refuses it.",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ]
    if scaling_named(view.plan.precision) == "tensorwise":
        lines += [
            "# Scales of 8-bit floats are powers of two, as the plan's (Transformer Engine).",
            "export NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1",
        ]
    lines += ["FLAGS=("]
    lines += [f"    --{name} {_quoted(value)}".rstrip() for name, value in flags.items()]
    lines += [
        ")",
        *torchrun_lines(view, '"${TRAIN:-pretrain_gpt.py}" "${FLAGS[@]}" "$@"'),
    ]
    return Emitted(files={"megatron-lm.sh": "\n".join(lines) + "\n"}, notes=tuple(notes))


def _quoted(value: str) -> str:
    return f"'{value}'" if set(value) & set("|*()[]") else value


register_emitter(
    Emitter(
        name="megatron-lm",
        summary="flags of Megatron-LM, in a script that starts a node",
        expresses=expresses(MEGATRON_LM, WORDS, INSTEAD),
        write=_write,
        # Megatron-Bridge configures what these flags do.
        executions=(*MEGATRON_LM.executions, *MEGATRON_BRIDGE.executions),
    )
)
