"""The reach of torch's own optimizers, measured once for all engines of a session, ranks included.

An engine measures how far each update of its optimizer reaches, by some hundred steps on small
tensors. Tests make engines by the hundred, with the same few optimizers. Tests of the measurement
use `planner.runtime.state.optimizers.reach`, and any other optimizer is measured each time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from planner.runtime.state.optimizers import reach
from tests.captures import FOLDER, keep

measure = reach._reach
_found: dict[tuple[type, str], reach.Reach | None] = {}


def reach_of(optimizer: torch.optim.Optimizer, at: int) -> reach.Reach | None:
    """As `reach._reach`, or its answer to an equal earlier question."""
    kind = type(optimizer)
    group = optimizer.param_groups[at]
    settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")}
    if not kind.__module__.startswith("torch.optim.") or optimizer.state or _holds(settings):
        return measure(optimizer, at)
    key = kind, repr(sorted(settings.items()))
    if key not in _found:
        _found[key] = _kept(repr(key), lambda: measure(optimizer, at))
    return _found[key]


def _kept(key: str, measured: Callable[[], reach.Reach | None]) -> reach.Reach | None:
    """What some process of the session measured before, in the folder of captures."""
    entry = Path(os.environ[FOLDER]) / f"{hashlib.sha256(key.encode()).hexdigest()}.reach"
    if entry.exists():
        found: reach.Reach | None = json.loads(entry.read_text())
        return found
    found = measured()
    keep(entry, found)
    return found


def _holds(settings: dict[str, Any]) -> bool:
    """Whether a setting is more than a number or a name: its text would not tell all of it."""
    values = [each for v in settings.values() for each in (v if isinstance(v, tuple) else (v,))]
    return not all(v is None or isinstance(v, bool | int | float | str) for v in values)


def measure_usual() -> None:
    """Measure the optimizers that most tests have."""
    param = [torch.nn.Parameter(torch.zeros(2, 2))]
    for optimizer in (
        torch.optim.AdamW(param),
        torch.optim.AdamW(param, eps=1e-3),
        torch.optim.SGD(param),
        torch.optim.SGD(param, momentum=0.9),
    ):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            reach_of(optimizer, 0)
