"""DeepSpeed: its JSON configuration.

The JSON tells the engine how data-parallel ranks share the model's state. A pipeline is written in
code there (PipelineModule), so plans with one are refused. Source, deepspeedai/DeepSpeed at
edaa72212672 (2026-08-22): deepspeed/runtime/config.py, constants.py, zero/config.py,
zero/offload_config.py, precision_config.py, tensor_parallel/config.py.
"""

from __future__ import annotations

import json
from typing import Any

from planner.emit.emitter import Emitted, Emitter, Rule, register_emitter
from planner.emit.view import PlanView


def _why_not_zero(view: PlanView) -> str:
    if view.plan.tp > 1 and view.plan.zero_stage == 3:
        return "DeepSpeed's AutoTP goes with ZeRO 0 to 2"
    return ""


def _why_not_host(view: PlanView) -> str:
    return "" if view.plan.zero_stage else "DeepSpeed offloads the optimizer of ZeRO 1 to 3"


def _why_not_precision(view: PlanView) -> str:
    if view.plan.precision == "bf16" or view.trained_dtype == "float32":
        return ""
    return f"DeepSpeed trains {view.trained_dtype} with fp32 master weights (`precision` bf16)"


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
    if view.plan.precision == "bf16":
        # The plan's sums of gradients are fp32.
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    return Emitted(
        files={"deepspeed.json": json.dumps(config, indent=2) + "\n"},
        notes=("the optimizer and its schedule are left to your script or your own JSON",),
    )


DEEPSPEED = register_emitter(
    Emitter(
        name="deepspeed",
        summary="DeepSpeed's JSON configuration (no pipeline)",
        expresses={
            "dp": "what is left of the world",
            "tp": "tensor_parallel.autotp_size",
            "microbatches": "train_micro_batch_size_per_gpu, gradient_accumulation_steps",
            "zero": Rule(how="zero_optimization.stage", unless=_why_not_zero),
            "precision": Rule(how="bf16, data_types", unless=_why_not_precision),
            "recompute": Rule(
                how="not in JSON",
                unless=lambda view: "the model's code says what DeepSpeed recomputes",
                instead="what the model's code recomputes",
            ),
            "optimizer-on-host": Rule(
                how="zero_optimization.offload_optimizer", unless=_why_not_host
            ),
            "layouts": Rule(
                how="AutoTP's own",
                unless=lambda view: "AutoTP places tensors by rules of its own",
                instead="AutoTP's own placements",
            ),
        },
        write=_write,
        executions=("deepspeed-zero3", "megatron-deepspeed"),
    )
)
