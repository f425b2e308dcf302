"""The log of Hugging Face's Trainer: its progress bar, else what it prints of the whole run.

Source: huggingface/transformers, src/transformers/trainer_utils.py (speed_metrics,
TrainerMemoryTracker.update_metrics) and trainer_callback.py (TrainerState, ProgressCallback). The
bar's rate is smoothed over its last steps; the rate of the whole run has the warm-up, evaluations
and checkpoints in it, and is taken where there is nothing else: in trainer_state.json, too.
"""

from __future__ import annotations

import re
from pathlib import Path

from profiles.logs.numbers import NUMBER, number
from profiles.logs.record import LogFormat, RunLog

_BAR = re.compile(rf"\| *(\d+)/(\d+) \[[^\]<]*<[^\],]*, *{NUMBER} ?(s/it|it/s)\b")
_STEPS = re.compile(rf"['\"]?train_steps_per_second['\"]?\s*[:=]\s*['\"]?{NUMBER}")
_SAMPLES = re.compile(rf"['\"]?train_samples_per_second['\"]?\s*[:=]\s*['\"]?{NUMBER}")
_RUNTIME = re.compile(rf"['\"]?train_runtime['\"]?\s*[:=]\s*['\"]?{NUMBER}")
_MOST_STEPS = re.compile(r"['\"]global_step['\"]\s*:\s*(\d+)")
_MEMORY = tuple(
    re.compile(rf"['\"]?{name}['\"]?\s*[:=]\s*['\"]?(-?\d+)")
    for name in (
        "before_init_mem_gpu",
        "init_mem_gpu_alloc_delta",
        "train_mem_gpu_alloc_delta",
        "train_mem_gpu_peaked_delta",
    )
)
"""Bytes on the device: what was there, what building the trainer and training added, and by how
much training went above that."""


def _read(path: Path, text: str, digest: str) -> RunLog:
    memory = [found for name in _MEMORY if (found := name.search(text))]
    return RunLog(
        stack=HUGGING_FACE.stack,
        path=path,
        digest=digest,
        unit="seconds",
        readings=_bar(text) or _whole_run(text),
        allocated_bytes=sum(float(found[1]) for found in memory) if len(memory) == 4 else None,
        said={"stack": "fsdp-flash"},
    )


def _bar(text: str) -> tuple[float, ...]:
    """Return seconds of a step as the bar of the training shows them; that of an evaluation counts
    to another number, and begins later.
    """
    shown = list(_BAR.finditer(text))
    if not shown:
        return ()
    total = shown[0][2]
    # (A bar of the same step is printed again when something else is.)
    by_step = {
        int(each[1]): number(each[3]) if each[4] == "s/it" else 1 / number(each[3])
        for each in shown
        if each[2] == total and number(each[3]) > 0
    }
    return tuple(by_step[step] for step in sorted(by_step))


def _whole_run(text: str) -> tuple[float, ...]:
    """Return seconds of a step on average."""
    runtime, steps = _RUNTIME.search(text), _MOST_STEPS.search(text)
    if runtime and steps and int(steps[1]):
        # (The rate is rounded to three digits behind the point, which of slow steps are few.)
        return (number(runtime[1]) / int(steps[1]),)
    rate = _STEPS.search(text)
    return (1 / number(rate[1]),) if rate and number(rate[1]) > 0 else ()


HUGGING_FACE = LogFormat(
    stack="Hugging Face Trainer",
    is_of=lambda text: any(each.search(text) for each in (_STEPS, _SAMPLES, _BAR)),
    read=_read,
)
"""The format."""
