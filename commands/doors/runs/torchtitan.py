"""A torchtitan configuration in toml, as a row."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from commands.doors.opened import Asked, parsed
from commands.doors.runs.described import (
    Columns,
    Configuration,
    DescribedRun,
    columns_of_sizes,
)
from commands.doors.torchtitan import run_of
from planner.language.templates import Transformer


def _is_for(path: Path) -> bool:
    if path.suffix != ".toml" or not path.is_file():
        return False
    held = parsed(path, tomllib.loads, "toml", "a torchtitan configuration")
    return isinstance(held.get("model"), dict) or isinstance(held.get("training"), dict)


def _read(path: Path, known: Columns) -> DescribedRun:
    gpus = known.get("gpus")
    run = run_of(path, Asked(gpus=gpus if isinstance(gpus, int) else None))
    trained, layout = run.trained, run.layout
    row: dict[str, Any] = {
        "stack": trained["execution"],
        "model": run.flavor,
        **_columns(run.sizes),
        "tp": layout["tp"],
        "cp": layout["cp"],
        "pp": layout["pp"],
        "zero_stage": layout["zero"],
        "recompute": run.recompute,
        "micro_batch": run.micro_batch,
        "dtype": run.dtype,
    }
    if "global_batch" in trained:
        row["global_batch"] = trained["global_batch"]
    return DescribedRun(row=row)


def _columns(sizes: Transformer) -> dict[str, Any]:
    """Return what a flavor says of its decoder, by column."""
    row: dict[str, Any] = {
        **columns_of_sizes(sizes),
        "gated_ffn": int(sizes.gated),
        "norm": sizes.norm,
        "positions": sizes.positions,
        "bias": int(sizes.bias),
        "qk_norm": int(sizes.query_key_norm),
        "tied": int(sizes.tied),
    }
    if sizes.head_dim:
        row["head_dim"] = sizes.head_dim
    if sizes.experts is not None:
        row |= {
            "num_experts": sizes.experts.number,
            "experts_per_token": sizes.experts.per_token,
            "ffn_hidden": sizes.experts.width,
        }
    return row


TORCHTITAN = Configuration(name="a torchtitan .toml", is_for=_is_for, read=_read)
"""The kind."""
