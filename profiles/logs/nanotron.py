"""nanotron's log: items as ``name: value`` between bars, numbers shortened (``1.25K``).

Source: huggingface/nanotron, src/nanotron/trainer.py (train_step_logs, log_memory) and
src/nanotron/logging/base.py (LogItem). A line stands for logging.iteration_step_info_interval
steps.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.units import MIB
from profiles.logs.numbers import NUMBER, most, short_number
from profiles.logs.record import LogFormat, RunLog

_SHORT = r"([\d.]+[KMBGT]?)"
_STEP = re.compile(
    rf"iteration: *\d+ */ *\d+ .*?(?:elapsed_)?time_per_iteration_ms: *{_SHORT}(.*)", re.I
)
_ALLOCATED = re.compile(rf"peak allocated:? *{NUMBER} ?MiB", re.I)
_RESERVED = re.compile(rf"peak reserved:? *{NUMBER} ?MiB", re.I)
_RATE = re.compile(rf"tokens_per_sec: *{_SHORT}.*?tokens_per_sec_per_gpu: *{_SHORT}")
_BATCH = re.compile(r"global_batch_size: *(\d+)\b(?!\.)")


def _read(path: Path, text: str, digest: str) -> RunLog:
    lines = list(_STEP.finditer(text))
    said: dict[str, Any] = {"stack": "nanotron"}
    last = lines[-1][0]
    if rates := _RATE.search(last):
        # Both are rounded, and a number of devices is whole.
        said["gpus"] = max(1, round(short_number(rates[1]) / short_number(rates[2])))
    if batch := _BATCH.search(last):
        said["global_batch"] = int(batch[1])
    return RunLog(
        stack=NANOTRON.stack,
        path=path,
        digest=digest,
        unit="seconds",
        readings=tuple(short_number(line[1]) / 1e3 for line in lines),
        allocated_bytes=most(_ALLOCATED.findall(text), MIB),
        reserved_bytes=most(_RESERVED.findall(text), MIB),
        said=said,
    )


NANOTRON = LogFormat(
    stack="nanotron", is_of=lambda text: _STEP.search(text) is not None, read=_read
)
"""The format."""
