"""A DeepSpeed json, as a part of a row: the model is another file's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commands.doors.deepspeed import read_deepspeed
from commands.doors.opened import parsed
from commands.doors.runs.described import Columns, Configuration, DescribedRun

OWN = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
"""Settings of which a DeepSpeed json has some, and no other json has any."""


def _is_for(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    held = parsed(path, json.loads, "JSON", "a DeepSpeed json")
    return isinstance(held, dict) and any(name in held for name in OWN)


def _read(path: Path, known: Columns) -> DescribedRun:
    gpus = known.get("gpus")
    trained, layout, _ = read_deepspeed(path, gpus if isinstance(gpus, int) else None)
    row: dict[str, Any] = {
        "stack": trained["execution"],
        "tp": layout["tp"],
        "pp": layout["pp"],
        "zero_stage": layout["zero"],
    }
    if "precision" in trained:
        row["dtype"] = "fp32" if trained["precision"] == "model" else trained["precision"]
    for said, name, column in (
        (trained, "global_batch", "global_batch"),
        (layout, "microbatch_size", "micro_batch"),
        (layout, "ep", "ep"),
    ):
        if name in said:
            row[column] = said[name]
    return DescribedRun(row=row)


DEEPSPEED = Configuration(name="a DeepSpeed json", is_for=_is_for, read=_read)
"""The kind."""
