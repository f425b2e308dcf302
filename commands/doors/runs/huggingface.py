"""A Hugging Face config.json: the sizes of a decoder, by column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands.doors.opened import parsed
from commands.doors.runs.described import Columns, Configuration, DescribedRun
from planner.errors import PlannerError

COLUMN_OF = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden",
    "vocab_size": "vocab",
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
    "n_inner": "ffn_hidden",
    "num_local_experts": "num_experts",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "ffn_hidden",
}
"""Columns of a config's names of sizes; what stands later is said over what stands earlier."""

GATED = ("silu", "swiglu", "swish")
"""Activations of feed-forwards with three matrices."""


def columns_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a decoder's configuration."""
    row: dict[str, Any] = {
        column: config[name]
        for name, column in COLUMN_OF.items()
        if isinstance(config.get(name), int) and not isinstance(config[name], bool)
    }
    activation = str(config.get("hidden_act") or config.get("activation_function") or "")
    row["gated_ffn"] = int(activation in GATED)
    if isinstance(config.get("tie_word_embeddings"), bool):
        row["tied"] = int(config["tie_word_embeddings"])
    return row


def _is_for(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    held = parsed(path, json.loads, "JSON", "a config.json")
    return isinstance(held, dict) and ("model_type" in held or "architectures" in held)


def _read(path: Path, known: Columns) -> DescribedRun:
    row = columns_of_config(parsed(path, json.loads, "JSON", "a config.json"))
    if not {"layers", "hidden", "heads"} <= row.keys():
        raise PlannerError(
            f"{path} has no num_hidden_layers, hidden_size and num_attention_heads; give the "
            "config.json of a decoder, or its sizes as columns of a run.toml"
        )
    return DescribedRun(row=row)


HUGGING_FACE = Configuration(name="a Hugging Face config.json", is_for=_is_for, read=_read)
"""The kind."""
