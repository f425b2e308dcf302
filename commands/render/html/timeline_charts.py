"""Charts over the time of a step: what each rank does when, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from commands.render.html.chart import COLORS, INK, Axis, Chart, Choice, Table, layout_of
from costmodel.compare import first_steady_step, step_seconds
from costmodel.memory.exact.over_time import MemoryMoment
from planner.timeline import (
    JOB_KINDS,
    OPTIMIZER,
    STAGES,
    Exchange,
    RankTimeline,
    Span,
    exchanges,
    in_order,
)
from planner.units import GIB, format_bytes, format_seconds
from search.report.words import MEMORY_WORDS

MOST_JOBS = 16_000
"""Jobs that are drawn: a browser stays quick with so many."""
MOST_RANKS = 16
"""Rows of a recorded run, and ranks whose memory is drawn."""
MOST_LANES = 32
"""Rows of jobs that have rows of lanes below them."""
LANE_WIDTH = 0.5
"""Height of a lane's bars, of its row."""
BESIDE_COMPUTE, EXPOSED = "exchanges beside compute", "exchanges, exposed"
MOST_MOMENTS = 600
"""Moments of memory of one rank; more are put together, the fullest of each few is drawn."""

_KINDS = {
    "F": ("forward", "blue"),
    "B": ("backward", "orange"),
    "I": ("backward of inputs", "yellow"),
    "W": ("weight gradients", "green"),
    OPTIMIZER: ("optimizer", "purple"),
}

_MEMORY_COLORS = {
    "parameter_bytes": "blue",
    "gradient_bytes": "teal",
    "optimizer_bytes": "purple",
    "activation_bytes": "orange",
    "transient_bytes": "yellow",
    "communication_bytes": "green",
    "batch_bytes": "brown",
    "allocator_bytes": "gray",
    "context_bytes": "red",
}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A rank as the chart has it: its jobs, and below them its lanes."""

    name: str
    """Of the row of its jobs; those of its lanes have the lane behind it."""
    jobs: Sequence[Span]
    """Jobs of the step, in order."""
    lanes: Mapping[str, Sequence[Exchange]]
    """What it exchanges, by lane; those of several senders together."""
    step_s: float = 0.0
    """Seconds of the step that it is a part of: predicted, or recorded."""

    @property
    def works_s(self) -> float:
        """Seconds in jobs."""
        return sum(s.end_s - s.start_s for s in self.jobs if s.kind in (*JOB_KINDS, OPTIMIZER))

    @property
    def num_bars(self) -> int:
        """Bars to draw."""
        return len(self.jobs) + sum(map(len, self.lanes.values()))

    def told(self) -> tuple[str, ...]:
        """Return its numbers, as the table has them."""
        lanes = {
            lane: (sum(each.exposed_s for each in found), sum(each.hidden_s for each in found))
            for lane, found in self.lanes.items()
        }
        return (
            self.name,
            str(len(self.jobs)),
            format_seconds(self.works_s),
            format_seconds(self.step_s - self.works_s),
            format_seconds(self.jobs[0].start_s),
            format_seconds(self.jobs[-1].end_s),
            *(
                ", ".join(f"{lane} {format_seconds(of[part])}" for lane, of in lanes.items())
                for part in (0, 1)
            ),
        )


def timeline_chart(predicted: Sequence[RankTimeline], measured: Sequence[RankTimeline]) -> Chart:
    """Return what each rank does when: as predicted, and in one recorded step beside it.

    Below a rank's jobs lies what it exchanges, a row for each axis: beside compute, and exposed.
    """
    rows = [_row(f"rank {line.pp_rank}", line, 0, 0.0) for line in predicted]
    predicted_s = max(span.end_s for row in rows for span in row.jobs)
    told, note = f"One step takes {format_seconds(predicted_s)}.", ""
    rows = [replace(row, step_s=predicted_s) for row in rows]
    if measured:
        step = _typical_step(measured)
        start_s = min(
            span.start_s + line.clock_offset_s
            for line in measured
            for span in line.spans
            if span.step == step
        )
        of_rank: dict[int, list[RankTimeline]] = {}
        for line in measured:
            of_rank.setdefault(line.pp_rank, []).append(line)
        most = max(1, MOST_RANKS // len(of_rank))
        beside = []
        for row, line in zip(rows, predicted, strict=True):
            beside.append(replace(row, name=f"rank {line.pp_rank} predicted"))
            for run in of_rank.get(line.pp_rank, [])[:most]:
                name = f"rank {line.pp_rank} measured ({run.rank})"
                recorded = _row(name, run, step, start_s - run.clock_offset_s)
                # A rank that was killed may lack the step.
                if recorded.jobs:
                    beside.append(recorded)
        measured_s = max(
            (span.end_s for row in beside if not row.step_s for span in row.jobs), default=0.0
        )
        # What a rank waits is a part of its own step: the other may be longer.
        rows = [replace(row, step_s=row.step_s or measured_s) for row in beside]
        told = (
            f"One step is predicted to take {format_seconds(predicted_s)} and took "
            f"{format_seconds(measured_s)}."
        )
        note = f" Step {step} of the recorded run is the one of median length."
    end_s = max(row.step_s for row in rows)
    shown, cut = _first_and_last(rows)
    if cut:
        note += (
            f" Of {cut:,} jobs in the middle of the step only the first and the last are drawn: "
            "they repeat."
        )
    names = [
        name for row in shown for name in (row.name, *(f"{row.name} {lane}" for lane in row.lanes))
    ]
    if len(names) > len(shown):
        note += (
            " Below the jobs stands what is exchanged. Within a predicted job only its sums by "
            "axis are known: what is beside its compute is drawn at the end of that, and what is "
            "exposed behind it."
        )
    layout = layout_of(
        Axis(title="time from the step's start (ms)", more={"range": [0, _ms(end_s)]}),
        Axis(title="", more={"categoryorder": "array", "categoryarray": names[::-1],
                             "fixedrange": True}),
        height=110 + 34 * len(shown) + 22 * (len(names) - len(shown)),
        barmode="overlay", bargap=0.12, dragmode="zoom",
        uniformtext={"minsize": 9, "mode": "hide"},
    )  # fmt: skip
    idle = {row.name: 1 - row.works_s / row.step_s for row in rows}
    least, most_idle = min(idle, key=idle.__getitem__), max(idle, key=idle.__getitem__)
    waits = (
        f"{most_idle.capitalize()} runs jobs for {1 - idle[most_idle]:.1%} of its step, {least} "
        f"{1 - idle[least]:.1%}."
        if len(rows) > 1
        else f"It runs jobs for {1 - idle[least]:.1%} of its step."
    )
    return Chart(
        name="timeline",
        data=[*_job_bars(shown), *_lane_bars(shown)],
        layout=layout,
        summary=f"{told} {waits}{note} Numbers in bars are microbatches.",
        table=Table(
            columns=(
                "", "jobs", "runs them", "waits or sends", "first job", "last job ends",
                "exchanges, exposed", "exchanges, beside compute",
            ),
            rows=tuple(row.told() for row in rows),
        ),
        zooms=True,
    )  # fmt: skip


def _job_bars(rows: Sequence[_Row]) -> Iterator[dict[str, Any]]:
    for kind, (label, color) in _KINDS.items():
        bars = [(row.name, span) for row in rows for span in row.jobs if span.kind == kind]
        if bars:
            yield _bars(
                label,
                color,
                [(name, span.start_s, span.end_s) for name, span in bars],
                "%{customdata[0]}: %{base:.4~g} to %{customdata[1]:.4~g} ms",
                [[span.name, _ms(span.end_s)] for _, span in bars],
            ) | {
                "text": ["" if span.microbatch < 0 else str(span.microbatch) for _, span in bars],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "constraintext": "inside",
                "textangle": 0,
                "textfont": {"color": "#fff", "size": 11},
            }


def _lane_bars(rows: Sequence[_Row]) -> Iterator[dict[str, Any]]:
    every = [
        (f"{row.name} {lane}", each)
        for row in rows
        for lane, found in row.lanes.items()
        for each in found
    ]
    beside = [(name, each) for name, each in every if each.hidden_s > 0]
    exposed = [(name, each, at) for name, each in every for at in each.exposed]
    if beside:
        yield _bars(
            BESIDE_COMPUTE,
            "teal",
            [(name, each.span.start_s, each.span.end_s) for name, each in beside],
            _LANE_HOVER,
            [_of_exchange(each) for _, each in beside],
            is_lane=True,
        )
    if exposed:
        yield _bars(
            EXPOSED,
            "red",
            [(name, *at) for name, _, at in exposed],
            _LANE_HOVER,
            [_of_exchange(each) for _, each, _ in exposed],
            is_lane=True,
        )


_LANE_HOVER = (
    "%{customdata[0]}<br>%{customdata[1]:.4~g} ms beside compute, %{customdata[2]:.4~g} ms exposed"
)


def _of_exchange(each: Exchange) -> list[Any]:
    """Return what a bar of it tells: what it is, and milliseconds hidden and exposed."""
    span = each.span
    of_job = "" if span.microbatch < 0 else f", microbatch {span.microbatch}"
    count = f"{span.number} " if span.number > 1 else ""
    size = f", {format_bytes(span.num_bytes)}" if span.num_bytes else ""
    return [f"{count}{span.name}{size}{of_job}", _ms(each.hidden_s), _ms(each.exposed_s)]


def _bars(
    label: str,
    color: str,
    bars: Sequence[tuple[str, float, float]],
    hover: str,
    told: Sequence[Sequence[Any]],
    *,
    is_lane: bool = False,
) -> dict[str, Any]:
    """Return bars (row, start, end) of one kind; those of lanes are lower, and may be so short that
    an edge would leave nothing of them.
    """
    shape = {"width": LANE_WIDTH} if is_lane else {}
    edge = {"width": 0 if is_lane else 0.5, "color": "@surface"}
    return shape | {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "y": [name for name, _, _ in bars],
        "base": [_ms(start_s) for _, start_s, _ in bars],
        "x": [_ms(end_s - start_s) for _, start_s, end_s in bars],
        "customdata": list(told),
        "hovertemplate": f"{hover}<extra>%{{y}}</extra>",
        "marker": {"color": COLORS[color], "line": edge},
    }


def _row(name: str, line: RankTimeline, step: int, start_s: float) -> _Row:
    """Return a rank's step, from its start, jobs in order."""

    def moved(span: Span) -> Span:
        return replace(
            span, start_s=span.start_s - start_s, end_s=span.end_s - start_s, memory_bytes=0
        )

    own = replace(line, spans=tuple(moved(span) for span in line.spans if span.step == step))
    found: dict[str, list[Exchange]] = {}
    for each in exchanges(own):
        if each.span.end_s > each.span.start_s:
            lane = STAGES if each.lane.startswith(STAGES) else each.lane
            found.setdefault(lane, []).append(each)
    return _Row(
        name=name,
        jobs=sorted(
            (span for span in own.spans if span.kind in _KINDS), key=lambda span: span.start_s
        ),
        lanes={lane: found[lane] for lane in in_order(set(found))},
    )


def _typical_step(measured: Sequence[RankTimeline]) -> int:
    """Return the step of median length, warm-up left out."""
    first = first_steady_step(measured)
    steps = sorted({s.step for line in measured for s in line.spans if s.step >= first})
    seconds = step_seconds(measured, first)
    by_length = sorted(zip(seconds, steps, strict=True))
    return by_length[len(by_length) // 2][1]


def _first_and_last(rows: Sequence[_Row]) -> tuple[list[_Row], int]:
    """Return rows with no more bars than can be drawn, and how many jobs are not."""
    half = MOST_LANES // 2
    if len(rows) > MOST_LANES:
        # Of many ranks the lanes of the first and the last are drawn.
        rows = [
            row if place < half or place >= len(rows) - half else replace(row, lanes={})
            for place, row in enumerate(rows)
        ]
    total, num_jobs = sum(row.num_bars for row in rows), sum(len(row.jobs) for row in rows)
    if total <= MOST_JOBS:
        return list(rows), 0
    each = max(2, MOST_JOBS * num_jobs // total // len(rows) // 2)
    kept = []
    for row in rows:
        if len(row.jobs) > 2 * each:
            left_s, again_s = row.jobs[each].start_s, row.jobs[-each].start_s
            row = replace(
                row,
                jobs=[*row.jobs[:each], *row.jobs[-each:]],
                lanes={
                    lane: [
                        one
                        for one in found
                        if one.span.start_s < left_s or one.span.end_s > again_s
                    ]
                    for lane, found in row.lanes.items()
                },
            )
        kept.append(row)
    return kept, num_jobs - sum(len(row.jobs) for row in kept)


def memory_chart(
    over_time: Sequence[Sequence[MemoryMoment]], limit_bytes: Sequence[float]
) -> Chart:
    """Return what each pp rank holds over the step, by part, against the limit."""
    totals = [max(float(m.parts.total) for m in moments) for moments in over_time]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    # The fullest rank is shown first, then all others in order.
    order = [fullest, *(rank for rank in range(len(over_time)) if rank != fullest)][:MOST_RANKS]
    parts = [
        name
        for name in MEMORY_WORDS
        if any(getattr(m.parts, name) for moments in over_time for m in moments)
    ]
    # What lies there all the time is drawn below what comes and goes.
    bottom = ["context_bytes", "parameter_bytes", "optimizer_bytes", "batch_bytes"]
    parts = [p for p in bottom if p in parts] + [p for p in parts if p not in bottom]
    data: list[dict[str, Any]] = []
    traces = []
    for rank in order:
        moments = _fullest_of_each_few(over_time[rank])
        times = [_ms(m.start_s) for m in moments] + [_ms(moments[-1].end_s)]
        traces.append(tuple(range(len(data), len(data) + len(parts))))
        for name in parts:
            held = [round(getattr(m.parts, name) / GIB, 4) for m in moments]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "stackgroup": f"rank {rank}",
                    "name": MEMORY_WORDS[name],
                    "x": times,
                    "y": [*held, held[-1]],
                    "line": {"shape": "hv", "width": 0.5, "color": COLORS[_MEMORY_COLORS[name]]},
                    "fillcolor": COLORS[_MEMORY_COLORS[name]] + "cc",
                    "hovertemplate": "%{y:.2f} GiB",
                    "visible": rank == fullest,
                }
            )
    end_ms = _ms(max(moments[-1].end_s for moments in over_time))
    limit = min(limit_bytes)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "limit",
            "x": [0, end_ms],
            "y": [limit / GIB] * 2,
            "line": {"color": INK, "dash": "dash", "width": 1.5},
            "hovertemplate": "%{y:.2f} GiB",
        }
    )
    at = max(over_time[fullest], key=lambda moment: float(moment.parts.total))
    left = limit_bytes[fullest] - totals[fullest]
    return Chart(
        name="memory",
        data=data,
        layout=layout_of(
            Axis(title="time from the step's start (ms)", more={"range": [0, end_ms]}),
            Axis(title="GiB of one device", more={"rangemode": "tozero"}),
            height=400,
            hovermode="x unified",
        ),
        summary=f"Rank {fullest} is the fullest: {format_bytes(totals[fullest])} during "
        f"{at.job}, {format_bytes(abs(left))} {'under' if left >= 0 else 'OVER'} the limit of "
        f"{format_bytes(limit_bytes[fullest])}. Each job is drawn at its height.",
        table=Table(
            columns=("fullest moment of", "during", *(MEMORY_WORDS[p] for p in parts), "total"),
            rows=tuple(_at_fullest(rank, moments, parts) for rank, moments in enumerate(over_time)),
        ),
        zooms=True,
        choice=Choice(
            label="Pipeline rank",
            options=tuple(f"rank {rank}" for rank in order),
            traces=tuple(traces),
        )
        if len(order) > 1
        else None,
    )


def _at_fullest(
    rank: int, moments: Sequence[MemoryMoment], parts: Sequence[str]
) -> tuple[str, ...]:
    at = max(moments, key=lambda moment: float(moment.parts.total))
    held = (format_bytes(float(getattr(at.parts, name))) for name in parts)
    return (f"rank {rank}", at.job, *held, format_bytes(float(at.parts.total)))


def _fullest_of_each_few(moments: Sequence[MemoryMoment]) -> list[MemoryMoment]:
    few = -(-len(moments) // MOST_MOMENTS)
    grouped = groupby(enumerate(moments), key=lambda pair: pair[0] // few)
    return [max((m for _, m in pairs), key=lambda m: float(m.parts.total)) for _, pairs in grouped]


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.7g}")
