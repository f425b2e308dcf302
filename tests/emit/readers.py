"""Readers of emitted files: systems' own parsers where a package has them, documented fields."""

from __future__ import annotations

import sys
from dataclasses import field, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


def assert_documented(values: dict, schema: dict) -> None:
    """Hold nested values to a schema of types, choices and sections."""
    for name, value in values.items():
        allowed = schema[name]
        if isinstance(allowed, dict):
            assert_documented(value, allowed)
        elif isinstance(allowed, tuple):
            assert value in allowed, (name, value)
        else:
            assert type(value) is allowed, (name, value)


PARALLELISM = {
    "data_parallel_replicate_degree": int,
    "data_parallel_shard_degree": int,
    "fsdp_reshard_after_forward": ("default", "always", "never"),
    "tensor_parallel_degree": int,
    "pipeline_parallel_degree": int,
    "module_fqns_per_model_part": list,
    "pipeline_parallel_schedule": str,
    "pipeline_parallel_schedule_csv": str,
    "context_parallel_degree": int,
    "expert_parallel_degree": int,
}
"""Fields that both forms have, from torchtitan's configs.py and v0.2.2's job_config.py."""

CURRENT = PARALLELISM | {"enable_sequence_parallel": bool, "num_pp_microbatches": int}
TRAINING = {
    "dtype": ("bfloat16", "float32"),
    "mixed_precision_param": ("bfloat16", "float32"),
    "num_tokens_per_microbatch_per_dp_rank": int,
    "num_tokens_per_train_step": int,
    "max_context_length": int,
    "disable_cuda_graphs": bool,
}
V02 = {
    "parallelism": PARALLELISM
    | {
        "pipeline_parallel_microbatch_size": int,
        "context_parallel_rotate_method": ("allgather", "alltoall"),
        "expert_tensor_parallel_degree": int,
    },
    "training": {
        "local_batch_size": int,
        "global_batch_size": int,
        "seq_len": int,
        "dtype": ("bfloat16", "float32"),
        "mixed_precision_param": ("bfloat16", "float32"),
    },
    "activation_checkpoint": {"mode": ("selective", "full", "memory_budget", "none")},
    "compile": {"enable": bool},
    "model": {"converters": list},
    "quantize": {
        "linear": {
            "float8": {
                "recipe_name": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
                "filter_fqns": list,
            }
        }
    },
}


def load_torchtitan(files, tmp_path, monkeypatch):
    """Run the emitted configuration against dataclasses of torchtitan's documented fields."""

    def module(name: str, **values) -> None:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(values)

    def record(name, schema):
        return make_dataclass(name, [(n, object, field(default=None)) for n in schema])

    training = record("TrainingConfig", TRAINING)
    compiling = record("CompileConfig", ("enable", "components"))
    spec = record("ModelSpec", ("model",))
    base = SimpleNamespace(
        training=training(),
        activation_checkpoint="its own",
        compile=compiling(enable=False, components=["model", "loss"]),
        model_spec=spec(model=("model",)),
    )
    policy = SimpleNamespace(Config=lambda: "full")
    module("torchtitan")
    module("torchtitan.config", ParallelismConfig=record("ParallelismConfig", CURRENT))
    module("torchtitan.components")
    module(
        "torchtitan.components.quantization",
        Float8LinearConverter=_converter("Float8LinearConverter", "recipe_name", "filter_fqns"),
        Float8GroupedExpertsConverter=_converter("Float8GroupedExpertsConverter"),
        MXFP8LinearConverter=_converter("MXFP8LinearConverter", "fqns"),
    )
    module("torchtitan.distributed")
    module("torchtitan.distributed.activation_checkpoint", FullAC=policy)
    module("torchtitan.models")
    module("torchtitan.models.llama3")
    module("torchtitan.models.llama3.config_registry", llama3_8b=lambda: base)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "planned.py"
    space = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space["planned"]()


def _converter(name: str, *fields: str) -> SimpleNamespace:
    """A converter that appends what it was given to a model, which is a tuple here."""

    def config(**given):
        assert given.keys() == {*fields, "model_compile_enabled"}
        told = tuple(tuple(v) if isinstance(v, list) else v for v in given.values())
        built = SimpleNamespace(convert=lambda model: (*model, (name, *told)))
        return SimpleNamespace(build=lambda: built)

    return SimpleNamespace(Config=config)


def loaded_by_torch(path, *, pp: int, num_stages: int, num_microbatches: int):
    """Read a csv as torchtitan does; lowering adds the sends and receives, or fails."""
    runtime = object.__new__(_PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime._defer_pp_recv = False
    runtime._stages = []
    runtime.pp_group_size, runtime._num_stages = pp, num_stages
    runtime._n_microbatches = num_microbatches
    runtime._load_csv(str(path))
    return runtime


DEEPSPEED_FIELDS = {
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "zero_optimization": {
        "stage": (0, 1, 2, 3),
        "offload_optimizer": {"device": ("none", "cpu", "nvme"), "pin_memory": bool},
    },
    "bf16": {"enabled": bool},
    "fp16": {"enabled": bool},
    "data_types": {"grad_accum_dtype": ("fp32", "fp16", "bf16")},
    "tensor_parallel": {"autotp_size": int},
    "expert_parallel": {"enabled": bool, "autoep_size": int},
}

NANOTRON_FIELDS = {
    "parallelism": {
        "dp": int,
        "pp": int,
        "tp": int,
        "context_parallel_size": int,
        "expert_parallel_size": int,
        "pp_engine": ("1f1b", "afab"),
        "tp_mode": ("ALL_REDUCE", "REDUCE_SCATTER"),
        "recompute_layer": bool,
    },
    "tokens": {
        "micro_batch_size": int,
        "batch_accumulation_per_replica": int,
        "sequence_length": int,
    },
    "model": {"dtype": ("float32", "float64", "complex64", "bfloat16", "float16", "uint8")},
    "optimizer": {"zero_stage": (0, 1), "accumulate_grad_in_fp32": bool},
}

ACCELERATE_FIELDS = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("FSDP", "MULTI_GPU"),
    "num_machines": int,
    "num_processes": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "rdzv_backend": ("static",),
    "mixed_precision": ("no", "bf16", "fp16"),
    "use_cpu": bool,
    "debug": bool,
    "fsdp_config": {
        "fsdp_version": (2,),
        "fsdp_reshard_after_forward": bool,
        "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
        "fsdp_activation_checkpointing": bool,
        "fsdp_offload_params": bool,
        "fsdp_state_dict_type": ("SHARDED_STATE_DICT",),
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": int,
        "parallelism_config_dp_shard_size": int,
        "parallelism_config_tp_size": int,
        "parallelism_config_cp_size": int,
        "parallelism_config_cp_comm_strategy": ("allgather", "alltoall"),
    },
}


def read_by_accelerate(path: Path) -> tuple[Any, bool]:
    """Return what `accelerate launch` reads of a file, and whether its dtype comes from it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    read, _, mixed_precision_from_file = _validate_launch_command(given)
    return read, mixed_precision_from_file
