"""Megatron-Bridge: overrides of a recipe's configuration, in a script that starts one node.

It configures Megatron-Core, so it expresses what Megatron-LM's flags do, by the names of its
dataclasses' fields. Source, NVIDIA-NeMo/Megatron-Bridge at 067f987df03b (2026-08-22):
scripts/training/run_recipe.py (KEY=VALUE), src/megatron/bridge/training/config.py
(ConfigContainer), docs/training/config-container-overview.md.
"""

from __future__ import annotations

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import NODE_SETTINGS, headline, torchrun_lines
from planner.emit.targets.megatron_lm import INSTEAD, WORDS, megatron_flags
from planner.emit.view import PlanView
from planner.language.stacks.known import MEGATRON_BRIDGE as STACK
from planner.language.stacks.known import MEGATRON_LM

SECTIONS = {
    "micro-batch-size": "train",
    "global-batch-size": "train",
    "seq-length": "dataset",
    "use-distributed-optimizer": "ddp",
    "overlap-grad-reduce": "ddp",
    "overlap-param-gather": "ddp",
    "use-megatron-fsdp": "ddp",
    "data-parallel-sharding-strategy": "ddp",
    "ckpt-format": "checkpoint",
    "optimizer-cpu-offload": "optimizer",
    "optimizer-offload-fraction": "optimizer",
    "use-precision-aware-optimizer": "optimizer",
}
"""The section of the configuration that each flag of Megatron-LM is a field of; others: model."""

OFF = {
    "sequence-parallel": "false",
    "pipeline-model-parallel-layout": "null",
    "expert-model-parallel-size": "1",
    "use-distributed-optimizer": "false",
    "overlap-param-gather": "false",
    "use-megatron-fsdp": "false",
    "recompute-granularity": "null",
    "recompute-method": "null",
    "recompute-num-layers": "null",
    "optimizer-cpu-offload": "false",
    "use-precision-aware-optimizer": "false",
    # A recipe's own cut is refused beside a layout of stages.
    "num-layers-in-first-pipeline-stage": "null",
    "num-layers-in-last-pipeline-stage": "null",
    "account-for-embedding-in-pipeline-split": "false",
    "account-for-loss-in-pipeline-split": "false",
}
"""What a plan without a flag sets its field to: a recipe may have set it otherwise."""

OWN_SIZES = frozenset(
    {
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "max-position-embeddings",
        "group-query-attention",
        "num-query-groups",
        "untie-embeddings-and-output-weights",
        "num-experts",
        "moe-router-topk",
        "moe-ffn-hidden-size",
        "moe-shared-expert-intermediate-size",
        "moe-layer-freq",
    }
)
"""Sizes of the model, which the recipe has."""


def overrides(view: PlanView) -> list[str]:
    """Return the fields of a configuration that a plan sets, each as KEY=VALUE."""
    flags = megatron_flags(view)
    fields = {
        name: _value(name, value)
        for name, value in flags.items()
        if name not in OWN_SIZES and name != "bf16"
    }
    # A plan without meshes for experts has them on tp, Megatron-Core's default; recipes have 1
    # here, whole experts on every rank of tp.
    off = OFF | {"expert-tensor-parallel-size": str(view.plan.tp)}
    fields |= {name: value for name, value in off.items() if name not in fields}
    found = [
        f"{SECTIONS.get(name, 'model')}.{name.replace('-', '_')}={value}"
        for name, value in fields.items()
    ]
    virtual = view.plan.vpp if view.plan.vpp > 1 else "null"
    found += [
        # Either of the two turns Megatron-FSDP on.
        f"dist.use_megatron_fsdp={fields['use-megatron-fsdp']}",
        f"optimizer.use_distributed_optimizer={fields['use-distributed-optimizer']}",
        f"model.virtual_pipeline_model_parallel_size={virtual}",
    ]
    return [*found, "mixed_precision=bf16_mixed"]


def _value(name: str, value: str) -> str:
    if name == "recompute-modules":
        return f"[{value}]"
    if not value:
        return "true"
    # Quotes for the parser of overrides: brackets and bars mean something to it.
    return f"'{value}'" if set(value) & set("|*()") else value


def _write(view: PlanView) -> Emitted:
    lines = ["#!/usr/bin/env bash", *headline(view, "Megatron-Bridge"), "set -euo pipefail"]
    lines += [
        "# Run it in a Megatron-Bridge checkout: RECIPE is your model's recipe, which has its",
        "# sizes; what you give the script goes to the runner (data, learning rate).",
        ': "${RECIPE:?name a recipe}"',
        *NODE_SETTINGS,
        "OVERRIDES=(",
        *(f'    "{text}"' for text in overrides(view)),
        ")",
        *torchrun_lines(
            view,
            'scripts/training/run_recipe.py --recipe "$RECIPE" --mode pretrain',
            '"$@" "${OVERRIDES[@]}"',
        ),
    ]
    return Emitted(
        files={"megatron-bridge.sh": "\n".join(lines) + "\n"},
        notes=("the recipe that you name has the model's sizes: RECIPE=... ./megatron-bridge.sh",),
    )


MEGATRON_BRIDGE = register_emitter(
    Emitter(
        name="megatron-bridge",
        summary="overrides of a Megatron-Bridge recipe, in a script that starts a node",
        expresses=expresses(STACK, WORDS | {"precision": "mixed_precision"}, INSTEAD),
        write=_write,
        executions=(*STACK.executions, *MEGATRON_LM.executions[:1]),
    )
)
