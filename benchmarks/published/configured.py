"""What configuration files that were published with runs say beyond the rows of their tables.

- MLPerf's LoRA submissions: config_*.sh and config_common.sh of each submitter's llama2_70b_lora in
  mlcommons/training_results_v4.0, v4.1 and v5.0.
- Megatron-Bridge's tables of mixtures of experts: the recipes of each release, scripts/performance
  of NVIDIA-NeMo/Megatron-Bridge at v0.1.0rc4 (25.09), v0.2.0 (25.11) and v0.3.0 (26.02).
- Its dense models: the same recipes. All sum gradients in 16 bits (grad_reduce_in_fp32 is False in
  scripts/performance), DeepSeek-V3's keep moments in 16 bits (recipes/deepseek/deepseek_v3.py),
  those of FSDP keep layers' activations on the host (cpu_offloading_num_layers), and in bf16 the
  optimizer keeps the lower halves of masters alone (use_precision_aware_optimizer, but for FSDP).
- dgxc-benchmarking's of November 2024 and February 2025: its yaml files at 35a9aec have
  grad_sync_dtype bf16, in which NeMo's optimizers sum and keep gradients, and but for Grok
  distributed_fused_adam, of which NeMo keeps the lower halves of masters alone
  (store_param_remainders).
- nanotron's Ultra-Scale Playbook: scripts/scaling_benchmarks.py of huggingface/nanotron.
- torchtitan's tables: train_configs/llama3_*.toml of pytorch/torchtitan, December 2024, have
  sequences of 8192, and that of 405B at 3faaa1a0d compiles.
- torchao's: its H100s are those of torchtitan's, 95 GiB at 2.4 TB/s (pytorch/torchtitan commit
  7a04053 prints 47.65 GiB as 50.16%; testing/training/roofline_utils.py of pytorch/ao).
- Megatron-LM's DeepSeek-V3, whose rows are one run after the other: each adds to those before it.
  Moments are in 16 bits (sbatch_benchmarking.sh of yanring/Megatron-MoE-ModelZoo at e865051).

Nothing here is measured: which dispatcher, which CUDA graphs, what is recomputed, what overlaps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BENCHMARK = "Llama2-70B-LoRA"

BLOCKS_70B = ("mbridge_25.09", "LLAMA3_70B", "GB200", "2.0")
"""Source, model, device and tp of a row that has the microbatch of its table's other row: the
recipe of blocks of 32 with tp 2 (fp8_mx) has one sample."""

BLACKWELL = ("B200", "GB200")

ALL = "CUDA graphs"
PARTS = "CUDA graphs of attention and router"
ROUTER = "CUDA graphs of router"
DEEP = "dispatcher DeepEP"
HYBRID = "dispatcher HybridEP"
OVERLAP = "all-to-all overlap"

STAGES_16 = {"pp_layout": "Et*4|(t*4|)*14tmL"}
STAGES_16_NEXT_ONLY = {"pp_layout": "Et*4|(t*4|)*14tL"}
STAGES_32 = {"pp_layout": "Et|(tt|)*30mL"}
OWN_STAGES = {"pp_layout": "Et*3|(tt|)*29m|L"}
"""Megatron-LM's own for as many (docs/user-guide/features/pipeline_parallel_layout.md)."""

WIDEST_TIED = 10_000
"""nanotron's benchmark ties the output matrix to the embedding where feed-forwards are narrower.
"""

TITAN_SEQ_LEN = "8192"

# Notes to add, what is recomputed, and cells that the table leaves blank or has otherwise than the
# recipe. By release, model and device.
# fmt: off
BRIDGE: Mapping[tuple[str, str, str], tuple[str, str, Mapping[str, str]]] = {
    ("26.02", "deepseek", "GB300"): (HYBRID, "selective: mla_up_proj", STAGES_16),
    ("26.02", "deepseek", "GB200"): (f"{HYBRID}, {PARTS}", "selective: mla_up_proj", STAGES_16),
    ("26.02", "deepseek", "B300"): (HYBRID, "selective: mla_up_proj", {"vpp": "1", **STAGES_16}),
    ("26.02", "deepseek", "B200"): (HYBRID, "selective: mla_up_proj", {"vpp": "1", **STAGES_16}),
    ("26.02", "gpt oss", "GB300"): (PARTS, "none", {}),
    ("26.02", "gpt oss", "B300"): (PARTS, "none", {}),
    ("26.02", "gpt oss", "GB200"): ("", "selective: layernorm, moe_act", {}),
    ("26.02", "gpt oss", "B200"): ("", "selective: layernorm, moe_act", {}),
    ("26.02", "gpt oss", "H100"): ("", "selective: layernorm, moe_act", {"vpp": "1"}),
    ("26.02", "30b", "GB300"): (f"{HYBRID}, {ROUTER}", "none", {}),
    ("26.02", "30b", "GB200"): (f"{HYBRID}, {ROUTER}", "none", {}),
    ("26.02", "30b", "B300"): (f"{HYBRID}, {ROUTER}", "none", {}),
    ("26.02", "30b", "B200"): (ROUTER, "none", {}),
    ("26.02", "30b", "H100"): (f"{DEEP}, {OVERLAP}", "none", {}),
    ("26.02", "235b", "GB300"): (f"{HYBRID}, {PARTS}", "none", {"vpp": "1"}),
    ("26.02", "235b", "GB200"): (f"{HYBRID}, {PARTS}", "none", {"vpp": "1"}),
    ("26.02", "235b", "B300"): (OVERLAP, "none", {}),
    ("26.02", "235b", "B200"): ("", "none", {"vpp": "1"}),
    ("26.02", "235b", "H100"): (OVERLAP, "none", {}),
    ("25.11", "deepseek", "GB300"): (f"{HYBRID}, {PARTS}", "selective: moe_act", {}),
    ("25.11", "deepseek", "GB200"): (f"{HYBRID}, {ROUTER}", "selective: mla_up_proj", {}),
    ("25.11", "deepseek", "B200"): ("", "selective: mla_up_proj", STAGES_16),
    ("25.11", "gpt oss", "GB300"): (PARTS, "none", {}),
    ("25.11", "gpt oss", "GB200"): ("", "selective: layernorm, moe_act", {}),
    # The table's ep is 8, its rate that of the next release's with 64.
    ("25.11", "gpt oss", "B200"): ("", "selective: layernorm, moe_act", {"ep": "64"}),
    # The table's micro batch and accumulation are those of the B200's row; 4 samples and 16 ranks
    # would make 8 microbatches of 512, and it says 2.
    ("25.11", "gpt oss", "H100"): ("", "selective: layernorm, moe_act", {"micro_batch": "1"}),
    ("25.11", "30b", "GB300"): (f"{HYBRID}, {ROUTER}", "none", {}),
    ("25.11", "30b", "GB200"): (f"{HYBRID}, {ROUTER}", "none", {}),
    ("25.11", "30b", "B200"): (ROUTER, "none", {}),
    # The table repeats the layout of 25.09.
    ("25.11", "30b", "H100"): (OVERLAP, "none", {"micro_batch": "1", "vpp": "12"}),
    ("25.11", "235b", "GB300"): (f"{HYBRID}, {ROUTER}", "none", {}),
    ("25.11", "235b", "GB200"): (f"{HYBRID}, {PARTS}", "none", {}),
    ("25.11", "235b", "B200"): (OVERLAP, "none", {}),
    ("25.11", "235b", "H100"): (OVERLAP, "none", {}),
    ("25.09", "deepseek", "GB200"): ("", "selective: mla_up_proj", STAGES_16),
    ("25.09", "deepseek", "B200"): ("", "selective: mla_up_proj", STAGES_16),
    ("25.09", "deepseek", "H100"): (f"{DEEP}, {OVERLAP}", "selective: mla_up_proj, mlp", STAGES_32),
    ("25.09", "30b", "GB200"): (ALL, "none", {}),
    ("25.09", "30b", "B200"): (ALL, "none", {}),
    ("25.09", "30b", "H100"): ("", "none", {"vpp": "12"}),
    ("25.09", "235b", "GB200"): (ALL, "none", {}),
    ("25.09", "235b", "B200"): ("", "none", {}),
    ("25.09", "235b", "H100"): ("", "none", {}),
}
# fmt: on

ON_HOST: Mapping[tuple[str, str], str] = {
    ("70b", "GB300"): "20",
    ("70b", "GB200"): "40",
    ("405b", "GB200"): "95",
}
"""Layers whose activations lie on the host in recipes with FSDP and one scale a tensor, by model
and device."""

CUMULATIVE = "cumulative optimisation: "
FIRST_GRAPHS = 5
"""Rows of Megatron-LM's DeepSeek-V3 ahead of the first with CUDA graphs; the one before it is the
first without recomputed up-projections."""
STEPS = (
    "baseline",
    "permute kernel + zeros fusion",
    "router fusion",
    "DeepEP",
    "no MLA up-proj recompute",
    "CUDA graphs",
    "DeepEP tuned",
    "CPU-side (bindpcie)",
    "PDL + MXFP8 swizzle fusion",
    "CUDA graph captures shared expert",
    "HybridEP",
    "CPU-side 2",
    "quantize fused into norm",
)


def as_configured(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row with what its run's configuration says where the row does not."""
    row = dict(row)
    if BENCHMARK in row["source_id"]:
        return _adapters(row)
    if row["source_id"].startswith("mbridge_"):
        return _bridge(row)
    if row["source_id"].startswith("dgxc_"):
        return _dgxc(row)
    if row["source_id"] == "ultrascale_playbook":
        return row | {"tied": str(int(int(row["ffn_hidden"]) < WIDEST_TIED))}
    if row["source_id"].startswith("torchtitan_"):
        return _titan(row)
    if row["source_id"] == "moecp_ao" and row["gpu"].startswith("H100"):
        return row | {"gpu": "H100-SXM (HBM2e)", "gpu_mem_gb": "96"}
    if CUMULATIVE in row["notes"]:
        return _cumulative(row)
    return row


def _adapters(row: dict[str, str]) -> dict[str, str]:
    """MLPerf's LoRA.

    All multiply in eight bits (FP8=True in config_common.sh, which a row's own file need not
    repeat). AMD's are NeMo on Transformer Engine for ROCm. From v4.1 on, layers are CUDA graphs
    (LAYER_CUDA_GRAPH or MCORE_CUDA_GRAPH) wherever cp is above 1, but on H200s without tp and in
    HPE's files. Weights of layers lie in eight bits alone (fp8_params is FP8, and
    disable_parameter_transpose_cache, in conf/megatron_gpt_peft_tuning_config.yaml of v4.0), but on
    H100 and L40S what SwiGLU takes, too (FP8_ACTIVATION, FP8_ACT). MI300X recomputes 21 of its 80
    layers (ACG=full, ACM=block, ACL=21). Not expressed: attention is in eight bits on some
    (FP8_DPA).
    """
    row["dtype"] = "fp8"
    if "H200-NVL" in row["notes"]:
        # Its system's name says which of the H200s it has.
        row["gpu"] = "H200 NVL"
    in_16_bits = row["gpu"].startswith(("H100", "L40S"))
    row["keeps_narrow"] = "weights" if in_16_bits else "weights activations"
    if row["gpu"].startswith("MI300X"):
        row |= {"recompute": "full", "recompute_layers": "21"}
    if row["stack"] == "mlperf-amd":
        row["stack"] = "primus"
    is_graphed = (
        row["stack"] == "nemo"
        and "v4.0" not in row["source_id"]
        and int(row["cp"]) > 1
        and (int(row["tp"]) > 1 or row["gpu"] in BLACKWELL)
        and "HPE" not in row["notes"]
    )
    if is_graphed:
        row["notes"] += "; CUDA graphs"
    return row


def _titan(row: dict[str, str]) -> dict[str, str]:
    """Tables of torchtitan."""
    row["seq_len"] = row["seq_len"] or TITAN_SEQ_LEN
    if row["source_id"] == "torchtitan_perf_2024" and "405B" in row["model"]:
        row["notes"] += "; torch.compile"
    return row


def _bridge(row: dict[str, str]) -> dict[str, str]:
    """Megatron-Bridge's.

    DeepSeek-V3 predicts a token ahead where its row does not say otherwise: printed TFLOP/s over
    tokens/s are 1.041 times the flop without, as the layer and the head more make them.
    """
    row |= {"gradient_bytes": "2"}
    model, gpu = row["model"].lower(), row["gpu"].partition("-")[0]
    if "deepseek" in model:
        row |= {"moment_bytes": "2"}
    if tuple(row[name] for name in ("source_id", "model", "gpu", "tp")) == BLOCKS_70B:
        row |= {"micro_batch": "1"}
    is_fsdp = row.get("zero_stage", "").startswith("3")
    if row["dtype"] == "bf16" and not is_fsdp:
        row |= {"master_bytes": "2"}
    if is_fsdp:
        size = model.rpartition("_")[2]
        row |= {"layers_on_host": ON_HOST.get((size, gpu), "")}
    for (release, name, device), (notes, recompute, cells) in BRIDGE.items():
        if row["source_id"].endswith(release) and re.search(name, model) and gpu == device:
            predicts = {
                "mtp_layers": str(int(name == "deepseek" and "w/o MTP" not in row["model"]))
            }
            said = {"recompute": recompute, "notes": f"{row['notes']}; {notes}"}
            return {**row, **predicts, **cells, **said}
    return row


def _dgxc(row: dict[str, str]) -> dict[str, str]:
    """NVIDIA's dgxc-benchmarking."""
    row |= {"gradient_bytes": "2"}
    return row if "grok" in row["source_id"] else row | {"master_bytes": "2"}


def _cumulative(row: dict[str, str]) -> dict[str, str]:
    """Megatron-LM's DeepSeek-V3: what earlier rows added holds for later ones."""
    step = STEPS.index(row["notes"].partition(CUMULATIVE)[2].partition(" dispatcher")[0])
    row |= {"mtp_layers": "1", "moment_bytes": "2", **OWN_STAGES}
    row["recompute"] = "selective: mlp" + ", mla_up_proj" * (step < FIRST_GRAPHS - 1)
    dispatcher = row["notes"].rpartition("dispatcher ")[2]
    row["notes"] = f"dispatcher {dispatcher}" + f"; {PARTS}" * (step >= FIRST_GRAPHS)
    return row
