"""Spans: what each rank did when, as one JSON-lines file per rank.

A file begins with a header and has one span per line, so that a killed run leaves all but
its last line readable:

    {"format": "planner-timeline", "version": 3, "rank": 1, "pp_rank": 1, "clock_offset_s": 0.0}
    {"kind": "F", "name": "F1.0", "step": 0, "stage": 1, "microbatch": 0, "start_s": …, "end_s": …}

Kinds are the job kinds F, B, I, W of the table; O and L, the optimizer and the learning rate's
scheduler, once a step (`planner.language.schedule.step_jobs`); R, what a backward recomputes before
its gradient has come; COLLECTIVE, inside a job, from its start until its result is used, with the
bytes of the whole tensor and the axis that it runs along (`lane`), and `rows` where it brings rows
to a rank's experts (`ROWS`); BESIDE, inside a COLLECTIVE, what is computed while it is under way;
REDUCE and CHECK, between the table and O: sums and norms of gradients, and the look
for NaN, for which ranks wait for each other; DEAL, of how samples of packed documents were dealt by
their work, in words; WAIT, for a tensor that has not come yet; and with
offload COPY, between device and host, and UPDATE, what of O is on the host. (Version 1 wrote
OPTIMIZE for O; version 2 no lanes.) Times are on the rank's own
clock; adding its offset gives rank 0's.

A simulated timetable has the same form, so prediction and measurement load side by side. There a
COLLECTIVE stands for all those of a job along an axis, `number` of them, of which `hidden_s` are
beside compute, and the end is not; MESSAGE is one between stages, from when it leaves to when it is
there.
Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import IO

from planner.errors import PlannerError
from planner.files import replacing

FORMAT, VERSION = "planner-timeline", 3

JOB_KINDS = ("F", "B", "I", "W")
REMAKE = "R"
COLLECTIVE = "COLLECTIVE"
MESSAGE = "MESSAGE"
BESIDE = "BESIDE"
ROWS = "rows to experts"
"""What a collective is called that brings rows to a rank's experts."""
COPY, UPDATE = "COPY", "UPDATE"
DEAL = "DEAL"
REDUCE, WAIT = "REDUCE", "WAIT"
STEP_JOB_KINDS = OPTIMIZER, LEARNING_RATE = "O", "L"
CHECK = "CHECK"
BESIDE_JOBS = (REMAKE, COLLECTIVE, MESSAGE, BESIDE, REDUCE, CHECK, DEAL, WAIT, COPY, UPDATE)
KINDS = (*JOB_KINDS, *STEP_JOB_KINDS, *BESIDE_JOBS)
_RENAMED = {"OPTIMIZE": OPTIMIZER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing a rank did. `stage` and `microbatch` are -1 where they mean nothing.

    `memory_bytes` is what the device held when it ended; 0 is unknown. `rows` are those that came
    to a rank's experts in an exchange, and 0 of all else. What is exchanged has the `lane` that it
    is drawn in, an axis of the mesh or whom it comes from, and the bytes of the whole tensors;
    `number` are the collectives that it stands for. `hidden_s` is its first part, beside compute,
    of a simulated one; in a recorded one lies BESIDE.
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
    lane: str = ""
    num_bytes: int = 0
    number: int = 1
    hidden_s: float = 0.0


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
        when = (s.start_s, s.end_s, s.memory_bytes, s.rows)
        file.write(span_line(*where, *when, s.lane, s.num_bytes, s.number, s.hidden_s))


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
    lane: str = "",
    num_bytes: int = 0,
    number: int = 1,
    hidden_s: float = 0.0,
) -> str:
    """A span as its line of JSON. Spelled out: a recorder writes many, and `json` is slow."""
    more = f', "rows": {rows}' if rows else ""
    if lane:
        more += f', "lane": {_quoted(lane)}'
    if num_bytes:
        more += f', "num_bytes": {num_bytes}'
    if number != 1 or hidden_s:
        more += f', "number": {number}, "hidden_s": {hidden_s:.7f}'
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
