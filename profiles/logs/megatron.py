"""Megatron-LM's log, and those of NeMo, Megatron-Bridge and others that print its lines.

Source: NVIDIA/Megatron-LM core_v0.15.0, megatron/training/training.py (training_log) and
megatron/training/utils.py (report_memory; its MB are 2**20 bytes). A line stands for
--log-interval steps.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.units import MIB
from profiles.logs.numbers import NUMBER, most, number
from profiles.logs.record import LogFormat, RunLog

_STEP = re.compile(rf"elapsed time per iteration \(ms\): *{NUMBER}")
_ALLOCATED = re.compile(rf"\| max allocated: *{NUMBER}")
_RESERVED = re.compile(rf"\| max reserved: *{NUMBER}")
_WORLD = re.compile(r"using world size: *(\d+)|^ *(?:\d+: *)?world_size \.+ (\d+)", re.M)
_BATCH = re.compile(r"global batch size: *(\d+)")


def _read(path: Path, text: str, digest: str) -> RunLog:
    said: dict[str, Any] = {"stack": "megatron-core"}
    if world := _WORLD.search(text):
        said["gpus"] = int(world[1] or world[2])
    if batches := _BATCH.findall(text):
        # (A batch that grows is at its size at the end, as the later readings are.)
        said["global_batch"] = int(batches[-1])
    return RunLog(
        stack=MEGATRON.stack,
        path=path,
        digest=digest,
        unit="seconds",
        readings=tuple(number(ms) / 1e3 for ms in _STEP.findall(text)),
        allocated_bytes=most(_ALLOCATED.findall(text), MIB),
        reserved_bytes=most(_RESERVED.findall(text), MIB),
        said=said,
    )


MEGATRON = LogFormat(
    stack="Megatron-LM", is_of=lambda text: _STEP.search(text) is not None, read=_read
)
"""The format."""
