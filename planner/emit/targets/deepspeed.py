"""DeepSpeed: its JSON configuration.

The JSON tells the engine how data-parallel ranks share the model's state. A pipeline is written in
code there (PipelineModule), so plans with one are refused. Source, deepspeedai/DeepSpeed at
edaa72212672 (2026-08-22): deepspeed/runtime/config.py, constants.py, zero/config.py,
zero/offload_config.py, precision_config.py, tensor_parallel/config.py.
"""

from __future__ import annotations

import json
from typing import Any

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.view import PlanView
from planner.language.stacks.known import DEEPSPEED as STACK


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
    notes = ["the optimizer and its schedule are left to your script or your own JSON"]
    if "recompute" not in view.accepted and "full" in view.recomputed:
        notes.append(
            "the script itself has all layers recomputed: model.gradient_checkpointing_enable()"
        )
    return Emitted(
        files={"deepspeed.json": json.dumps(config, indent=2) + "\n"}, notes=tuple(notes)
    )


DEEPSPEED = register_emitter(
    Emitter(
        name="deepspeed",
        summary="DeepSpeed's JSON configuration (no pipeline)",
        expresses=expresses(
            STACK,
            {
                "dp": "what is left of the world",
                "tp": "tensor_parallel.autotp_size",
                "microbatches": "train_micro_batch_size_per_gpu, gradient_accumulation_steps",
                "zero": "zero_optimization.stage",
                "precision": "bf16, data_types",
                "recompute": "the script: gradient_checkpointing_enable()",
                "optimizer-on-host": "zero_optimization.offload_optimizer",
                "layouts": "AutoTP's own",
            },
            {
                "recompute": "what the model's code recomputes",
                "layouts": "AutoTP's own placements",
            },
        ),
        write=_write,
        executions=STACK.executions,
    )
)
