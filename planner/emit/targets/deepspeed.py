"""DeepSpeed: its JSON configuration.

The JSON tells the engine how data-parallel ranks share the model's state, and experts. A pipeline
is written in code there (PipelineModule), so plans with one are refused. Source,
deepspeedai/DeepSpeed at edaa72212672 (2026-08-22): deepspeed/runtime/config.py, constants.py,
zero/config.py, zero/offload_config.py, precision_config.py, tensor_parallel/config.py. Experts
(AutoEP): DeepSpeed 0.19.8, deepspeed/module_inject/auto_ep_config.py, auto_ep_folding.py and
auto_ep_presets/, docs/code-docs/source/autoep.rst; groups of ep are ranks that follow each other,
as ours, and under ZeRO an expert's state is sharded over the ranks that hold it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, Rule, register_emitter
from planner.emit.view import PlanView
from planner.language.stacks.known import DEEPSPEED as STACK

_ROUTED = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"),
    *("deepseek_v2", "deepseek_v3", "minimax_m3_vl_text"),
)
"""`hf_model_types` of AutoEP's presets."""


def _why_no_experts(view: PlanView) -> str:
    if view.plan.tp > 1 and view.plan.optimizer_on_host:
        return "AutoEP beside AutoTP has no optimizer on the host"
    return ""


def _write(view: PlanView) -> Emitted:
    plan = view.plan
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.optimizer_on_host:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": zero,
    }
    if plan.precision != "model":
        # (The scale of fp16's loss is dynamic where nothing is said of it.)
        config[plan.precision] = {"enabled": True}
    if plan.precision == "bf16" or (plan.precision == "fp16" and plan.zero_stage):
        # The plan's sums of gradients are fp32.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.degrees["ep"] > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": plan.degrees["ep"]}
    notes = ["the optimizer and its schedule are left to your script or your own JSON"]
    if plan.precision == "fp16" and not plan.zero_stage:
        # `_do_optimizer_sanity_check` of engine.py takes no fp32 sums of fp16 gradients there.
        notes.append("without ZeRO DeepSpeed sums the gradients of fp16 in fp16, the plan in fp32")
    if "recompute" not in view.accepted and "full" in view.recomputed:
        notes.append(
            "the script itself has all layers recomputed: model.gradient_checkpointing_enable()"
        )
    if plan.degrees["ep"] > 1:
        notes.append(
            f"AutoEP routes by the preset of the model's config.model_type ({', '.join(_ROUTED)}); "
            "of another, expert_parallel says itself how its router scores (score_func, route_norm)"
        )
    return Emitted(
        files={"deepspeed.json": json.dumps(config, indent=2) + "\n"}, notes=tuple(notes)
    )


def _expressed() -> dict[str, str | Rule]:
    found = expresses(
        STACK,
        {
            "dp": "what is left of the world",
            "tp": "tensor_parallel.autotp_size",
            "ep": "expert_parallel.autoep_size",
            "microbatches": "train_micro_batch_size_per_gpu, gradient_accumulation_steps",
            "zero": "zero_optimization.stage",
            "precision": "bf16 or fp16, data_types",
            "recompute": "the script: gradient_checkpointing_enable()",
            "optimizer-on-host": "zero_optimization.offload_optimizer",
            "layouts": "AutoTP's own",
        },
        {
            "recompute": "what the model's code recomputes",
            "layouts": "AutoTP's own placements",
        },
    )
    named = found["ep"]
    assert isinstance(named, Rule), "a stack that finds experts by names has a rule"
    unless = named.unless
    found["ep"] = replace(named, unless=lambda view: unless(view) or _why_no_experts(view))
    return found


DEEPSPEED = register_emitter(
    Emitter(
        name="deepspeed",
        summary="DeepSpeed's JSON configuration (no pipeline)",
        expresses=_expressed(),
        write=_write,
        executions=STACK.executions,
    )
)
