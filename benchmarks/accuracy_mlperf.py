"""What the configuration files of MLPerf's LoRA submissions say beyond their rows.

Read in mlcommons/training_results_v4.0, v4.1 and v5.0 (config_*.sh and config_common.sh of each
submitter's llama2_70b_lora).
"""

from __future__ import annotations

from collections.abc import Mapping

BENCHMARK = "Llama2-70B-LoRA"

BLACKWELL = ("B200", "GB200")


def as_submitted(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row with what its submission's configuration says where the row does not.

    All multiply in eight bits (FP8=True in config_common.sh, which a row's own file need not
    repeat). From v4.1 on, layers are CUDA graphs (LAYER_CUDA_GRAPH or MCORE_CUDA_GRAPH) wherever cp
    is above 1, but on H200s without tp and in HPE's files. Not expressed: on MI300X 21 of the 80
    layers are recomputed (ACL=21), and attention is in eight bits on some (FP8_DPA).
    """
    row = dict(row)
    if BENCHMARK not in row["source_id"]:
        return row
    row["dtype"] = "fp8"
    is_graphed = (
        row["stack"] == "nemo"
        and "v4.0" not in row["source_id"]
        and int(row["cp"]) > 1
        and (int(row["tp"]) > 1 or row["gpu"] in BLACKWELL)
        and "HPE" not in row["notes"]
    )
    if is_graphed:
        row["notes"] += " CUDA graphs"
    return row
