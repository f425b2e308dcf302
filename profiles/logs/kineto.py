"""A trace of torch.profiler (Kineto): where the steps of a rank's device went.

Source: pytorch/kineto, libkineto/src/output_json.cpp (chrome's trace events, microseconds;
``deviceProperties`` and ``distributedInfo`` beside them), and torch/profiler/profiler.py (a
``ProfilerStep#N`` around each step, shown on the device as well). A step goes from one such mark to
the next. On the device it is split into intervals of which each has one name:

    kernels | collectives alone | messages between stages alone | nothing

A profiler slows the host, so of a run with a log the step is the log's and the parts are shares of
it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from planner.errors import PlannerError
from profiles.logs.record import LogFormat, RunLog, StepParts

MICROSECOND = 1e-6

_STEP = re.compile(r"ProfilerStep#\d+")
_COLLECTIVE = re.compile(r"^(?:nccl|rccl|void (?:nccl|rccl))|\b[nr]ccl(?:Dev)?Kernel", re.I)
_KINDS = (
    (re.compile(r"SendRecv|send|recv", re.I), "send_recv"),
    (re.compile(r"all_?reduce", re.I), "all_reduce"),
    (re.compile(r"reduce_?scatter", re.I), "reduce_scatter"),
    (re.compile(r"all_?gather", re.I), "all_gather"),
    (re.compile(r"all_?to_?all", re.I), "all_to_all"),
    (re.compile(r"broadcast", re.I), "broadcast"),
)
_KERNELS = (
    (re.compile(r"flash|fmha|attention|sdpa", re.I), "attention"),
    (re.compile(r"gemm|gemv|cutlass|xmma|nvjet|matmul|cublas|Cijk_", re.I), "products"),
)

Spans = np.ndarray
"""Starts and ends (n, 2), in microseconds, in order and apart."""


def _read(path: Path, text: str, digest: str) -> RunLog:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlannerError(f"{path} is no whole trace ({error}); export it again") from None
    events = held.get("traceEvents") if isinstance(held, dict) else held
    if not isinstance(events, list):
        raise PlannerError(f"{path} has no list traceEvents; give a trace of torch.profiler")
    events = [each for each in events if isinstance(each, dict) and _is_timed(each)]
    on_device = [each for each in events if each.get("cat") in ("kernel", "Kernel")]
    windows = _windows(events)
    if not windows or not on_device:
        lacks = "steps (profiler.step() once a step)" if not windows else "kernels of a GPU"
        raise PlannerError(f"{path} has no {lacks}; trace a few steps of a training on GPUs")
    parts = [_parts(on_device, window) for window in windows]
    told = _median_parts(parts)
    return RunLog(
        stack=KINETO.stack,
        path=path,
        digest=digest,
        unit="seconds",
        readings=tuple(each.step_s for each in parts),
        parts=told,
        said=_said(held if isinstance(held, dict) else {}),
    )


def _is_timed(event: Mapping[str, Any]) -> bool:
    return (
        event.get("ph") == "X"
        and isinstance(event.get("ts"), int | float)
        and isinstance(event.get("dur"), int | float)
        and isinstance(event.get("name"), str)
    )


def _said(held: Mapping[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    devices, world = held.get("deviceProperties"), held.get("distributedInfo")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        said |= {"gpu": devices[0]["name"]} if "name" in devices[0] else {}
    if isinstance(world, dict) and isinstance(world.get("world_size"), int):
        said["gpus"] = world["world_size"]
    return said


def _windows(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return start and end of each step: on the device where marks of it are there, as the host
    runs ahead.
    """
    marks: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if _STEP.fullmatch(event["name"]):
            on_device = event.get("cat") == "gpu_user_annotation"
            marks[on_device].append((event["ts"], event["ts"] + event["dur"]))
    found = sorted(set(marks[True] or marks[False]))
    if len(found) < 2:
        return found
    # Up to the next step's start: what lies between two steps is of the first.
    return [
        (start, following)
        for (start, _), (following, _) in itertools.pairwise(found)
        if following > start
    ]


def _parts(events: Sequence[Mapping[str, Any]], window: tuple[float, float]) -> StepParts:
    first, end = window
    kernels: dict[str, list[tuple[float, float]]] = {}
    collectives: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        start, stop = max(first, event["ts"]), min(end, event["ts"] + event["dur"])
        if start < stop:
            name = event["name"]
            if _COLLECTIVE.search(name):
                said = (event.get("args") or {}).get("Collective name") or name
                collectives.setdefault(_kind(str(said), _KINDS), []).append((start, stop))
            else:
                kernels.setdefault(_kind(name, _KERNELS), []).append((start, stop))
    computing = _union([span for spans in kernels.values() for span in spans])
    messages = _union(collectives.get("send_recv", []))
    sharing = _union(
        [span for kind, spans in collectives.items() if kind != "send_recv" for span in spans]
    )
    busy_us = _length(computing)
    shared_us = _length(_merge(computing, sharing)) - busy_us
    all_us = _length(_merge(_merge(computing, sharing), messages))
    return StepParts(
        kernels_s=busy_us * MICROSECOND,
        collectives_s=shared_us * MICROSECOND,
        waits_s=(all_us - busy_us - shared_us) * MICROSECOND,
        host_s=(end - first - all_us) * MICROSECOND,
        by_kernel_s=_seconds(kernels),
        by_collective_s=_seconds(collectives),
    )


def _kind(name: str, kinds: Iterable[tuple[re.Pattern[str], str]]) -> str:
    return next((kind for words, kind in kinds if words.search(name)), "other")


def _seconds(spans: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    return {
        kind: sum(stop - start for start, stop in found) * MICROSECOND
        for kind, found in spans.items()
    }


def _union(spans: Sequence[tuple[float, float]]) -> Spans:
    """Return spans that overlap as one each."""
    if not spans:
        return np.empty((0, 2))
    found = np.array(sorted(spans))
    # A span begins a new one where it starts after all before it have ended.
    ends = np.maximum.accumulate(found[:, 1])
    begins = np.concatenate([[True], found[1:, 0] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(found) - 1]])
    return np.stack([found[begins, 0], ends[last]], axis=1)


def _merge(spans: Spans, others: Spans) -> Spans:
    return _union([(start, stop) for start, stop in np.concatenate([spans, others]).tolist()])


def _length(spans: Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def _median_parts(parts: Sequence[StepParts]) -> StepParts:
    """Return the parts of a typical step: each part's median."""

    def of(kinds: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = sorted({name for each in kinds for name in each})
        return {name: median(each.get(name, 0.0) for each in kinds) for name in names}

    return StepParts(
        kernels_s=median(each.kernels_s for each in parts),
        collectives_s=median(each.collectives_s for each in parts),
        waits_s=median(each.waits_s for each in parts),
        host_s=median(each.host_s for each in parts),
        by_kernel_s=of([each.by_kernel_s for each in parts]),
        by_collective_s=of([each.by_collective_s for each in parts]),
    )


KINETO = LogFormat(stack="torch.profiler", is_of=lambda text: '"traceEvents"' in text, read=_read)
"""The format."""
