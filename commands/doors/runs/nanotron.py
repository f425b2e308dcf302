"""A nanotron configuration in yaml, as a row.

Source: huggingface/nanotron, src/nanotron/config/config.py, parallelism_config.py and
models_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from commands.doors.opened import parsed
from commands.doors.runs.described import Columns, Configuration, DescribedRun
from commands.doors.runs.huggingface import columns_of_config
from planner.errors import PlannerError

SCHEDULES = {"1f1b": "1F1B", "afab": "GPipe"}
"""Our schedules by its names of engines."""


def _load(text: str) -> Any:
    try:
        yaml = import_module("yaml")
    except ImportError:
        raise PlannerError(
            "a .yaml is read with PyYAML, which is not installed; install it: pip install "
            "'planner[yaml]', or write the run's columns into a run.toml"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _is_for(path: Path) -> bool:
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    held = parsed(path, _load, "yaml", "a nanotron configuration")
    return isinstance(held, dict) and {"parallelism", "tokens", "model"} <= held.keys()


def _read(path: Path, known: Columns) -> DescribedRun:
    held = parsed(path, _load, "yaml", "a nanotron configuration")
    model, layout, tokens = (
        _section(path, held, name) for name in ("model", "parallelism", "tokens")
    )
    dp, micro = _number(path, layout, "dp"), _number(path, tokens, "micro_batch_size")
    row: dict[str, Any] = {
        "stack": "nanotron",
        **columns_of_config(_section(path, model, "model_config")),
        "seq_len": _number(path, tokens, "sequence_length"),
        "micro_batch": micro,
        "global_batch": micro * dp * _number(path, tokens, "batch_accumulation_per_replica", 1),
        "dp": dp,
        "tp": _number(path, layout, "tp", 1),
        "pp": _number(path, layout, "pp", 1),
        "cp": _number(path, layout, "context_parallel_size", 1),
        "ep": _number(path, layout, "expert_parallel_size", 1),
        "sp": int(str(layout.get("tp_mode") or "").upper() == "REDUCE_SCATTER"),
        "schedule": SCHEDULES.get(str(layout.get("pp_engine") or "").lower(), ""),
        "recompute": "full" if layout.get("recompute_layer") else "none",
        "dtype": str(model.get("dtype") or "bfloat16"),
    }
    row["gpus"] = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    optimizer = held.get("optimizer")
    if isinstance(optimizer, Mapping):
        row["zero_stage"] = _number(path, optimizer, "zero_stage", 0, least=0)
        row["gradient_bytes"] = 4 if optimizer.get("accumulate_grad_in_fp32", True) else 2
    return DescribedRun(row=row)


def _section(path: Path, held: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = held.get(name)
    if not isinstance(value, Mapping):
        raise PlannerError(f"{path} has {name} {value!r}; it takes a section")
    return value


def _number(
    path: Path, section: Mapping[str, Any], name: str, usual: int | None = None, *, least: int = 1
) -> int:
    value = section.get(name, usual)
    if value is None and usual is not None:
        return usual
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlannerError(f"{path} has {name} {value!r}; it takes {least} or more")
    return value


NANOTRON = Configuration(name="a nanotron .yaml", is_for=_is_for, read=_read)
"""The kind."""
