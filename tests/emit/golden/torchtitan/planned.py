# A torchtitan configuration, written by `planner emit` from plan.json:
# 8 ranks, dp=2 cp=1 tp=2 pp=2 vpp=2, interleaved_1f1b, 4 microbatches of 1, ZeRO 3.
# The model it is for has 6 layers.
from dataclasses import replace
from pathlib import Path

from torchtitan.config import ParallelismConfig

# Your model's own configuration: its sizes, data, optimizer.
from torchtitan.models.llama3.config_registry import llama3_8b as base


def planned():
    config = base()
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=2,
        fsdp_reshard_after_forward="always",
        tensor_parallel_degree=2,
        context_parallel_degree=1,
        expert_parallel_degree=1,
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        module_fqns_per_model_part=[
            ["tok_embeddings", "layers.0"],
            ["layers.1", "layers.2"],
            ["layers.3", "layers.4"],
            ["layers.5", "norm", "lm_head"],
        ],
        enable_sequence_parallel=True,
        num_pp_microbatches=4,
        pipeline_parallel_schedule_csv=str(Path(__file__).with_name("schedule.csv")),
    )
    config.training = replace(
        config.training,
        dtype="float32",
        mixed_precision_param="bfloat16",
        num_tokens_per_microbatch_per_dp_rank=8192,
        num_tokens_per_train_step=65536,
        max_context_length=8192,
        disable_cuda_graphs=True,
    )
    config.activation_checkpoint = None
    return config
