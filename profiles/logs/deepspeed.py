"""DeepSpeed's log: its throughput timer's lines, and those of its pipeline engine.

Source: deepspeedai/DeepSpeed, deepspeed/utils/timer.py (ThroughputTimer: samples of the whole
batch; its GB are 2**30 bytes) and deepspeed/runtime/pipe/engine.py (train_batch). Of the timer the
rate of the current step counts: the running average has the warm-up in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.units import GIB
from profiles.logs.numbers import NUMBER, most, number
from profiles.logs.record import LogFormat, RunLog, Unit

_TIMER = re.compile(rf"CurrSamplesPerSec={NUMBER}")
_PIPELINE = re.compile(rf"steps: \d+ .*?iter time \(s\): *{NUMBER}")
_ALLOCATED = re.compile(rf"MaxMemAllocated={NUMBER} ?GB")
_WORLD = re.compile(r"world_size=(\d+)|world size: *(\d+)", re.I)


def _read(path: Path, text: str, digest: str) -> RunLog:
    unit: Unit = "seconds"
    readings = _PIPELINE.findall(text)
    if not readings:
        unit, readings = "samples_per_s", _TIMER.findall(text)
    said: dict[str, Any] = {"stack": "deepspeed-zero3"}
    if world := _WORLD.search(text):
        said["gpus"] = int(world[1] or world[2])
    return RunLog(
        stack=DEEPSPEED.stack,
        path=path,
        digest=digest,
        unit=unit,
        readings=tuple(map(number, readings)),
        allocated_bytes=most(_ALLOCATED.findall(text), GIB),
        said=said,
    )


DEEPSPEED = LogFormat(
    stack="DeepSpeed",
    is_of=lambda text: any(line.search(text) for line in (_TIMER, _PIPELINE)),
    read=_read,
)
"""The format."""
