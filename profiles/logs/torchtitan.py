"""torchtitan's log: tokens per second and device, and the memory that the allocator held at most.

Source: pytorch/torchtitan, torchtitan/components/metrics.py (MetricsProcessor.log): tps counts the
tokens of a replica over the devices that share them; memory is reserved_bytes.all.peak since the
last line. A line stands for metrics.log_freq steps, the first for one. Lines of validation begin
otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.units import GIB
from profiles.logs.numbers import NUMBER, most, number
from profiles.logs.record import LogFormat, RunLog

_STEP = re.compile(rf"(?<!validate )step: *\d+ .*?memory: *{NUMBER}GiB.*?tps: *{NUMBER}")
_DEVICE = re.compile(r"(?:CUDA|GPU|ROCM) capacity: (.+?) (?:\(\d+\) )?with")
_MESH = re.compile(r"Building \d+-D device mesh with .*?, *\[([\d, ]+)\]")


def _read(path: Path, text: str, digest: str) -> RunLog:
    lines = _STEP.findall(text)
    said: dict[str, Any] = {"stack": "torchtitan"}
    if device := _DEVICE.search(text):
        said["gpu"] = device[1].strip()
    if mesh := _MESH.search(text):
        gpus = 1
        for degree in mesh[1].split(","):
            gpus *= int(degree)
        said["gpus"] = gpus
    return RunLog(
        stack=TORCHTITAN.stack,
        path=path,
        digest=digest,
        unit="tokens_per_s_per_device",
        readings=tuple(number(tps) for _, tps in lines),
        reserved_bytes=most((gib for gib, _ in lines), GIB),
        said=said,
    )


TORCHTITAN = LogFormat(
    stack="torchtitan", is_of=lambda text: _STEP.search(text) is not None, read=_read
)
"""The format."""
