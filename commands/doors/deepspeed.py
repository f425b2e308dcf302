"""A DeepSpeed json beside a model: the batch, the precision, and how its own run shares the state.

Source: deepspeedai/DeepSpeed at edaa72212672 (2026-08-22), deepspeed/runtime/config.py,
zero/config.py, precision_config.py; of experts 0.19.8, module_inject/auto_ep_config.py. "auto" is
what a trainer fills in: it says nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands.doors.opened import parsed
from planner.errors import PlannerError


def read_deepspeed(path: Path, gpus: int | None) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return what a file says is trained, how it lays it out, both as options of `search`, and a
    line for the user.

    Raises PlannerError, in one line, for a file that is no such configuration.
    """
    said = parsed(path, json.loads, "JSON", "--deepspeed a DeepSpeed json")
    if not isinstance(said, dict) or "model_type" in said:
        raise PlannerError(f"--deepspeed {path} is no DeepSpeed configuration; give one")
    zero = _section(path, said, "zero_optimization")
    tensor = _section(path, said, "tensor_parallel")
    experts = _section(path, said, "expert_parallel")
    micro = _number(path, said, "train_micro_batch_size_per_gpu")
    accumulated = _number(path, said, "gradient_accumulation_steps")
    batch = _number(path, said, "train_batch_size")
    tp = _number(path, tensor, "autotp_size") or 1
    if batch is None and micro is not None and gpus is not None:
        batch = micro * (accumulated or 1) * max(1, gpus // tp)
    halves = {name: _switch(path, name, _section(path, said, name)) for name in ("bf16", "fp16")}
    clip = said.get("gradient_clipping", 0)
    if clip != "auto" and (not isinstance(clip, int | float) or clip != clip):
        raise PlannerError(f"--deepspeed {path} has gradient_clipping {clip!r}; it takes a number")
    trained: dict[str, Any] = {"execution": "deepspeed-zero3"}
    if any(switch is not None for switch in halves.values()):
        on = [name for name, switch in halves.items() if switch is True]
        trained["precision"] = on[0] if on else "model"
    if clip != "auto":
        trained["clip_gradients"] = clip > 0
    if batch is not None:
        trained["global_batch"] = batch
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise PlannerError(f"--deepspeed {path} has stage {stage!r} of ZeRO; it takes 0 to 3")
    layout: dict[str, Any] = {"tp": tp, "pp": 1, "zero": stage}
    if _switch(path, "expert_parallel", experts) is True:
        layout["ep"] = _number(path, experts, "autoep_size") or 1
    if micro is not None:
        layout["microbatch_size"] = micro
    if _is_offloaded(zero.get("offload_optimizer")):
        layout["offload"] = "optimizer"
    if _is_offloaded(zero.get("offload_param")):
        raise PlannerError(
            f"--deepspeed {path} has offload_param, which is not priced; take it out"
        )
    note = (
        f"{path}: global batch {batch or 'not said'}, precision "
        f"{trained.get('precision', 'not said')}; how it is laid out is searched (--keep-layout: "
        "as the file has it)"
    )
    return trained, layout, note


def _switch(path: Path, name: str, section: Mapping[str, Any]) -> bool | None:
    """Return whether a section is enabled; None where it does not say."""
    value = section.get("enabled", "auto")
    if value != "auto" and not isinstance(value, bool):
        raise PlannerError(f"--deepspeed {path} has enabled {value!r} in {name}; it takes a bool")
    return None if value == "auto" else value


def _is_offloaded(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("device") not in (None, "none")


def _section(path: Path, said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = said.get(name) or {}
    if not isinstance(value, Mapping):
        raise PlannerError(f"--deepspeed {path} has {name} {value!r}; it takes a section")
    return value


def _number(path: Path, said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    if value in (None, "auto"):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlannerError(f"--deepspeed {path} has {name} {value!r}; it takes 1 or more")
    return value
