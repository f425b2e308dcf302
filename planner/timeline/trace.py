"""Timelines as a Chrome trace, which Perfetto reads, too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from planner.files import write_atomically
from planner.timeline.lanes import Exchange, exchanges, in_order, lane_of
from planner.timeline.spans import COPY, UPDATE, RankTimeline, Span

COMPUTE = "compute"
EXPOSED = "exposed"
_HOST = {COPY: "host copies", UPDATE: "host"}
_PID_STRIDE = 1_000_000  # keeps the ranks of two timelines apart in one trace


def chrome_trace(timeline: Iterable[RankTimeline], *, label: str = "") -> dict[str, Any]:
    """Return all ranks on rank 0's clock as a Chrome trace.

    Each rank is a process with a track for compute, one for each lane of what it exchanges
    (`planner.timeline.lanes`), with offload one for copies and one for the host's work, and a
    memory counter. Inside what is exchanged lies what of it is exposed. `label` goes before the
    ranks' names, to tell two timelines in one view apart.
    """
    return {"traceEvents": list(_events(timeline, label, 0, 1)), "displayTimeUnit": "ms"}


def save_trace(
    path: str | os.PathLike[str], timelines: Mapping[str, Iterable[RankTimeline]]
) -> None:
    """Write timelines, by label, as one Chrome trace: such as predicted beside measured, of which
    each rank's stand one below the other.
    """
    events = [
        event
        for number, (label, timeline) in enumerate(timelines.items())
        for event in _events(timeline, label, number, len(timelines))
    ]
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(
    timeline: Iterable[RankTimeline], label: str, number: int, count: int
) -> Iterable[dict[str, Any]]:
    for line in timeline:
        pid = line.rank + number * _PID_STRIDE
        name = f"{label} rank {line.rank} (pp {line.pp_rank})".strip()
        yield _told(pid, "process_name", name=name)
        yield _told(pid, "process_sort_index", sort_index=line.pp_rank * count + number)
        lanes = in_order({lane for span in line.spans if (lane := lane_of(span))})
        used = {_HOST[span.kind] for span in line.spans if span.kind in _HOST}
        tracks = [COMPUTE, *lanes, *(track for track in _HOST.values() if track in used)]
        tid_of = {track: tid for tid, track in enumerate(tracks)}
        for track, tid in tid_of.items():
            yield _told(pid, "thread_name", tid=tid, name=track)
            yield _told(pid, "thread_sort_index", tid=tid, sort_index=tid)
        for span in line.spans:
            if not lane_of(span):
                tid = tid_of[_HOST.get(span.kind, COMPUTE)]
                yield _slice(line, pid, tid, span, {"step": span.step})
            if span.memory_bytes:
                yield {
                    "ph": "C",
                    "pid": pid,
                    "name": "memory",
                    "ts": (span.end_s + line.clock_offset_s) * 1e6,
                    "args": {"bytes": span.memory_bytes},
                }
        for each in exchanges(line):
            yield from _exchange(line, pid, tid_of[each.lane], each)


def _exchange(line: RankTimeline, pid: int, tid: int, each: Exchange) -> Iterable[dict[str, Any]]:
    """Yield what is exchanged and, in it, what of it is exposed."""
    span = each.span
    told = {
        "step": span.step,
        "hidden_ms": each.hidden_s * 1e3,
        "exposed_ms": each.exposed_s * 1e3,
        "collectives": span.number,
    }
    if span.num_bytes:
        told["bytes"] = span.num_bytes
    yield _slice(line, pid, tid, span, told)
    if each.hidden_s > 0:
        for start_s, end_s in each.exposed:
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": EXPOSED,
                "cat": EXPOSED,
                "ts": (start_s + line.clock_offset_s) * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "args": {"step": span.step},
            }


def _slice(
    line: RankTimeline, pid: int, tid: int, span: Span, told: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": span.name,
        "cat": span.kind,
        "ts": (span.start_s + line.clock_offset_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": told,
    }


def _told(pid: int, what: str, *, tid: int | None = None, **args: Any) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": pid, "name": what, "args": args}
    return event if tid is None else event | {"tid": tid}
