"""A run's columns in toml: what no other file says of it, in the words of docs/estimate-rows.md."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path

from commands.doors.opened import parsed
from commands.doors.runs.described import Columns, Configuration, DescribedRun
from planner.errors import PlannerError

_NAMES = """
stack gpu gpu_mem_gb nodes gpus layers hidden heads kv_heads head_dim ffn_hidden gated_ffn vocab
vocab_multiple seq_len params_b global_batch micro_batch tp cp pp dp vpp sp ep etp num_experts
experts_per_token shared_width dense_layers dense_ffn query_rank key_rank rope_dim norm positions
bias qk_norm max_positions encoder_layers encoder_seq_len sees_all transforms_head mtp_layers
dispatcher expert_imbalance attention dropout deterministic cut_products grouped_experts
keeps_narrow wide_softmax masks_batch gradient_bytes moment_bytes master_bytes loss_bytes cp_comm
not_overlapped pp_layout layers_on_host zero_stage microbatch_group schedule recompute
recompute_layers dtype tied lora_rank model notes
"""
COLUMNS = frozenset(_NAMES.split())
"""Columns of a row."""


def _is_for(path: Path) -> bool:
    """Whether a toml file has no sections: those of systems have nothing else."""
    if path.suffix != ".toml" or not path.is_file():
        return False
    held = parsed(path, tomllib.loads, "toml", "columns of a run, or a torchtitan configuration")
    return not any(isinstance(value, dict) for value in held.values())


def _read(path: Path, known: Columns) -> DescribedRun:
    held = parsed(path, tomllib.loads, "toml", "columns of a run")
    for name, value in held.items():
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PlannerError(
                f"{path} has {name} = {value!r}, which is no column of a run; {hint}they are those "
                "of docs/estimate-rows.md"
            )
        if not isinstance(value, str | int | float):
            raise PlannerError(
                f"{path} has {name} = {value!r}; a column takes a number or a text: {name} = 8"
            )
    # (A switch is a number in a row.)
    row = {k: int(value) if isinstance(value, bool) else value for k, value in held.items()}
    return DescribedRun(row=row)


TABLE = Configuration(name="columns of a run in a .toml", is_for=_is_for, read=_read)
"""The kind."""
