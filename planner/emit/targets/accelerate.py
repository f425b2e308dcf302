"""accelerate: the YAML file of `accelerate launch --config_file`, with FSDP2 where ZeRO shards.

Source, huggingface/accelerate at 16cb6eb80dd9 (2026-07-24): src/accelerate/commands/config/
config_args.py (ClusterConfig), commands/launch.py (fsdp_*, parallelism_config_*),
utils/dataclasses.py (FullyShardedDataParallelPlugin: reshard_after_forward of FSDP2).
"""

from __future__ import annotations

from planner.emit.declared import expresses
from planner.emit.emitter import Emitted, Emitter, register_emitter
from planner.emit.start import headline
from planner.emit.view import PlanView
from planner.language.plan import low_dtype
from planner.language.stacks.known import ACCELERATE as STACK


def _is_sharded(view: PlanView) -> bool:
    return view.plan.zero_stage >= 2


def _write(view: PlanView) -> Emitted:
    plan = view.plan
    values: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if _is_sharded(view) else "MULTI_GPU",
        "num_machines": view.num_nodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
        "main_process_ip": "localhost",
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "mixed_precision": plan.precision if low_dtype(plan.precision) else "'no'",
        "use_cpu": str(view.device == "cpu").lower(),
        "debug": "false",
    }
    lines = headline(view, "A configuration of accelerate launch")
    lines += [f"{name}: {value}" for name, value in values.items()]
    if _is_sharded(view):
        fsdp = {
            "fsdp_version": 2,
            # ZeRO 3 frees gathered parameters behind each forward; ZeRO 2 keeps them.
            "fsdp_reshard_after_forward": str(plan.zero_stage == 3).lower(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": str("full" in view.recomputed).lower(),
            "fsdp_offload_params": "false",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        lines += ["fsdp_config:", *(f"  {name}: {value}" for name, value in fsdp.items())]
    if plan.degrees["rp"] * plan.tp * plan.cp > 1:
        sizes = {
            "dp_replicate": plan.degrees["rp"],
            "dp_shard": plan.dp,
            "tp": plan.tp,
            "cp": plan.cp,
        }
        lines.append("parallelism_config:")
        lines += [f"  parallelism_config_{axis}_size: {size}" for axis, size in sizes.items()]
        if plan.cp > 1:
            sent = "alltoall" if view.cp_kind() == "ring" else "allgather"
            lines.append(f"  parallelism_config_cp_comm_strategy: {sent}")
    notes = [
        f"the script itself gives Accelerator(gradient_accumulation_steps={plan.num_microbatches}) "
        f"and batches of {plan.microbatch_size}"
    ]
    if view.num_nodes > 1:
        notes.append(
            "give each node accelerate launch --machine_rank and --main_process_ip of its own"
        )
    return Emitted(files={"accelerate.yaml": "\n".join(lines) + "\n"}, notes=tuple(notes))


ACCELERATE = register_emitter(
    Emitter(
        name="accelerate",
        summary="the configuration file of accelerate launch (no pipeline)",
        expresses=expresses(
            STACK,
            {
                "rp": "parallelism_config_dp_replicate_size",
                "dp": "num_processes, parallelism_config_dp_shard_size",
                "tp": "parallelism_config_tp_size",
                "cp": "parallelism_config_cp_size",
                "microbatches": "the script: gradient_accumulation_steps",
                "zero": "2 and 3: fsdp_reshard_after_forward",
                "precision": "mixed_precision",
                "recompute": "fsdp_activation_checkpointing",
                "layouts": "the model's tp_plan",
            },
            {"layouts": "the model's own tp_plan"},
        ),
        write=_write,
        executions=STACK.executions,
    )
)
