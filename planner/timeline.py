"""Timelines: what each rank did when, as one JSON-lines file per rank, and as one trace.

A file begins with a header and has one span per line, so that a killed run leaves all but
its last line readable:

    {"format": "planner-timeline", "version": 2, "rank": 1, "pp_rank": 1, "clock_offset_s": 0.0}
    {"kind": "F", "name": "F1.0", "step": 0, "stage": 1, "microbatch": 0, "start_s": …, "end_s": …}

Kinds are the job kinds F, B, I, W of the table; O and L, the optimizer and the learning rate's
scheduler, once a step (`planner.language.schedule.step_jobs`); R, what a backward recomputes before
its gradient has come; COLLECTIVE, inside a job, from its start until its result is used,
with `rows` where it brings rows to a rank's experts (`ROWS`); BESIDE, inside a COLLECTIVE, weight
gradients made while it is under way; REDUCE and CHECK,
between the table and O: sums and norms of gradients, and the look
for NaN, for which ranks wait for each other; DEAL, of how samples of packed documents were dealt by
their work, in words; WAIT, for a tensor that has not come yet; and with
offload COPY, between device and host, and UPDATE, what of O is on the host. (Version 1 wrote
OPTIMIZE for O.) Times are on the rank's own
clock; adding its offset gives rank 0's. A simulated timetable is written the same way, so
prediction and measurement load side by side.
Torch-free.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import IO, Any

from planner.errors import PlannerError
from planner.files import replacing, write_atomically

FORMAT, VERSION = "planner-timeline", 2

JOB_KINDS = ("F", "B", "I", "W")
REMAKE = "R"
COLLECTIVE = "COLLECTIVE"
BESIDE = "BESIDE"
ROWS = "rows to experts"
"""What a collective is called that brings rows to a rank's experts."""
COPY, UPDATE = "COPY", "UPDATE"
DEAL = "DEAL"
STEP_JOB_KINDS = OPTIMIZER, LEARNING_RATE = "O", "L"
CHECK = "CHECK"
BESIDE_JOBS = (REMAKE, COLLECTIVE, BESIDE, "REDUCE", CHECK, DEAL, "WAIT", COPY, UPDATE)
KINDS = (*JOB_KINDS, *STEP_JOB_KINDS, *BESIDE_JOBS)
_RENAMED = {"OPTIMIZE": OPTIMIZER}
_TRACKS = {"WAIT": 1, "REDUCE": 1, CHECK: 1, DEAL: 1, COLLECTIVE: 1, COPY: 2, UPDATE: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing a rank did. `stage` and `microbatch` are -1 where they mean nothing.

    `memory_bytes` is what the device held when it ended; 0 is unknown. `rows` are those that came
    to a rank's experts in an exchange, and 0 of all else.
    """

    kind: str
    name: str
    step: int
    start_s: float
    end_s: float
    stage: int = -1
    microbatch: int = -1
    memory_bytes: int = 0
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """One rank's spans, in the order they were written, on its own clock."""

    rank: int
    pp_rank: int
    clock_offset_s: float
    spans: tuple[Span, ...]


def rank_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of a rank in a timeline folder."""
    return Path(folder) / f"rank_{rank:05d}.jsonl"


def write_header(file: IO[str], *, rank: int, pp_rank: int, clock_offset_s: float) -> None:
    """Write the first line of a rank's file."""
    header = {"format": FORMAT, "version": VERSION, "rank": rank, "pp_rank": pp_rank}
    file.write(json.dumps(header | {"clock_offset_s": clock_offset_s}) + "\n")


def write_spans(file: IO[str], spans: Iterable[Span]) -> None:
    """Append spans, one line each."""
    for s in spans:
        where = (s.kind, s.name, s.step, s.stage, s.microbatch)
        file.write(span_line(*where, s.start_s, s.end_s, s.memory_bytes, s.rows))


def span_line(
    kind: str,
    name: str,
    step: int,
    stage: int,
    microbatch: int,
    start_s: float,
    end_s: float,
    memory_bytes: int,
    rows: int = 0,
) -> str:
    """A span as its line of JSON. Spelled out: a recorder writes many, and `json` is slow."""
    more = f', "rows": {rows}' if rows else ""
    return (
        f'{{"kind": "{kind}", "name": {_quoted(name)}, "step": {step}, "stage": {stage}, '
        f'"microbatch": {microbatch}, "start_s": {start_s:.7f}, "end_s": {end_s:.7f}, '
        f'"memory_bytes": {memory_bytes}{more}}}\n'
    )


def save_timeline(timeline: Iterable[RankTimeline], folder: str | os.PathLike[str]) -> None:
    """Write whole timelines, such as simulated ones, into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for line in timeline:
        with replacing(rank_file(folder, line.rank)) as path, path.open("w") as file:
            write_header(
                file, rank=line.rank, pp_rank=line.pp_rank, clock_offset_s=line.clock_offset_s
            )
            write_spans(file, line.spans)


def load_timeline(folder: str | os.PathLike[str]) -> tuple[RankTimeline, ...]:
    """Read every rank's file; a last line cut short by a killed run is dropped.

    Raises PlannerError when there is no such file or one is not a timeline.
    """
    paths = sorted(Path(folder).glob("rank_*.jsonl"))
    if not paths:
        raise PlannerError(f"no timeline in {folder}; launch the plan with `timeline` {folder}")
    return tuple(map(_load_rank, paths))


def _load_rank(path: Path) -> RankTimeline:
    first, *rest = path.read_text().split("\n")
    try:
        header = json.loads(first)
        if header["format"] != FORMAT or header["version"] > VERSION:
            raise KeyError("format")
        # The text after the last newline is empty, or a line that was never finished.
        spans = tuple(_span(line) for line in rest[:-1])
        return RankTimeline(
            rank=header["rank"],
            pp_rank=header["pp_rank"],
            clock_offset_s=header["clock_offset_s"],
            spans=spans,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PlannerError(
            f"{path} is not a timeline of version {VERSION} ({error!r}); update planner, or record "
            "the run again"
        ) from None


def _span(line: str) -> Span:
    fields = json.loads(line)
    kind = fields["kind"] = _RENAMED.get(fields["kind"], fields["kind"])
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; there are {', '.join(KINDS)}")
    return Span(**fields)


def chrome_trace(timeline: Iterable[RankTimeline], *, label: str = "") -> dict[str, Any]:
    """Return all ranks on rank 0's clock as a Chrome trace (also read by Perfetto).

    Each rank is a process with a track for compute, one for communication, with offload one
    for copies and one for the host's work, and a memory counter.
    `label` goes before the ranks' names, to tell two timelines in one view apart.
    """
    events: list[dict[str, Any]] = []
    for line in timeline:
        pid = line.rank
        name = f"{label} rank {line.rank} (pp {line.pp_rank})".strip()
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        used = {0, 1} | {_TRACKS.get(span.kind, 0) for span in line.spans}
        for tid, track in enumerate(("compute", "communication", "host copies", "host")):
            if tid not in used:
                continue
            args = {"name": track}
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": args})
        for span in line.spans:
            start_us = (span.start_s + line.clock_offset_s) * 1e6
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": _TRACKS.get(span.kind, 0),
                    "name": span.name,
                    "cat": span.kind,
                    "ts": start_us,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"step": span.step},
                }
            )
            if span.memory_bytes:
                end_us = (span.end_s + line.clock_offset_s) * 1e6
                events.append(
                    {
                        "ph": "C",
                        "pid": pid,
                        "name": "memory",
                        "ts": end_us,
                        "args": {"bytes": span.memory_bytes},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_PID_STRIDE = 1_000_000  # keeps the ranks of two timelines apart in one trace


def save_trace(
    path: str | os.PathLike[str], timelines: Mapping[str, Iterable[RankTimeline]]
) -> None:
    """Write timelines, by label, as one Chrome trace: such as predicted beside measured."""
    events = [
        event | {"pid": event["pid"] + number * _PID_STRIDE}
        for number, (label, timeline) in enumerate(timelines.items())
        for event in chrome_trace(timeline, label=label)["traceEvents"]
    ]
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBubble:
    """How one rank spent one step, from the first job anywhere to the last one's end.

    Jobs are those of the table: the optimizer's, which may run beside other ranks' backwards, is
    apart.
    """

    rank: int
    """The rank."""
    pp_rank: int
    """Its pipeline rank."""
    step: int
    """Number of the step, from 0."""
    step_s: float
    """Seconds from the first job of any rank to the last one's end."""
    compute_s: float
    """Seconds in jobs, without what collectives inside them expose."""
    collective_s: float
    """Seconds that those collectives expose: beside which no weight gradients are made."""
    optimizer_s: float
    """Seconds of the optimizer's job, after the rank's last job of the table."""

    @property
    def bubble_s(self) -> float:
        """Time in no job."""
        return self.step_s - self.compute_s - self.collective_s

    @property
    def bubble_fraction(self) -> float:
        """Part of the step in no job."""
        return self.bubble_s / self.step_s


def dealt_by_work(timeline: Sequence[RankTimeline]) -> list[str]:
    """Return how documents of the last recorded batch were dealt, in words; nothing where none
    were.
    """
    # (All ranks have one order.)
    return [span.name for span in timeline[0].spans if span.kind == DEAL][-1:] if timeline else []


def bubbles(timeline: Iterable[RankTimeline]) -> tuple[RankBubble, ...]:
    """Return how every rank spent every step, by step, then rank."""
    timeline = tuple(timeline)
    jobs: dict[tuple[int, int], list[Span]] = defaultdict(list)
    collective_s: dict[tuple[int, int], float] = defaultdict(float)
    optimizer_s: dict[tuple[int, int], float] = defaultdict(float)
    for line in timeline:
        for span in line.spans:
            if span.kind in JOB_KINDS or span.kind == REMAKE:
                jobs[span.step, line.rank].append(span)
            elif span.kind == COLLECTIVE and span.microbatch >= 0:
                collective_s[span.step, line.rank] += span.end_s - span.start_s
            elif span.kind == BESIDE:
                collective_s[span.step, line.rank] -= span.end_s - span.start_s
            elif span.kind == OPTIMIZER:
                optimizer_s[span.step, line.rank] += span.end_s - span.start_s
    result = []
    for step in sorted({step for step, _ in jobs}):
        bounds = [
            (span.start_s + line.clock_offset_s, span.end_s + line.clock_offset_s)
            for line in timeline
            for span in jobs.get((step, line.rank), [])
        ]
        if not bounds:
            continue
        step_s = max(end for _, end in bounds) - min(start for start, _ in bounds)
        for line in timeline:
            spans = jobs.get((step, line.rank), [])
            inside_s = collective_s.get((step, line.rank), 0.0)
            result.append(
                RankBubble(
                    rank=line.rank,
                    pp_rank=line.pp_rank,
                    step=step,
                    step_s=step_s,
                    compute_s=sum(s.end_s - s.start_s for s in spans) - inside_s,
                    collective_s=inside_s,
                    optimizer_s=optimizer_s.get((step, line.rank), 0.0),
                )
            )
    return tuple(result)
