"""Charts over the time of a step: what each rank does when, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from commands.render.html.chart import COLORS, INK, Axis, Chart, Choice, Table, layout_of
from costmodel.compare import first_steady_step, step_seconds
from costmodel.memory.exact.over_time import MemoryMoment
from planner.timeline import JOB_KINDS, OPTIMIZER, RankTimeline, Span
from planner.units import GIB, format_bytes, format_seconds
from search.report.words import MEMORY_WORDS

MOST_JOBS = 16_000
"""Jobs that are drawn: a browser stays quick with so many."""
MOST_RANKS = 16
"""Rows of a recorded run, and ranks whose memory is drawn."""
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


def timeline_chart(predicted: Sequence[RankTimeline], measured: Sequence[RankTimeline]) -> Chart:
    """Return what each rank does when: as predicted, and in one recorded step beside it."""
    rows = [(f"rank {line.pp_rank}", _of_step(line, 0, 0.0)) for line in predicted]
    predicted_s = max(span.end_s for _, spans in rows for span in spans)
    told, note = f"One step takes {format_seconds(predicted_s)}.", ""
    step_s = dict.fromkeys((name for name, _ in rows), predicted_s)
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
        rows = []
        for line in predicted:
            rows.append((f"rank {line.pp_rank} predicted", _of_step(line, 0, 0.0)))
            for run in of_rank.get(line.pp_rank, [])[:most]:
                name = f"rank {line.pp_rank} measured ({run.rank})"
                # A rank that was killed may lack the step.
                if spans := _of_step(run, step, start_s - run.clock_offset_s):
                    rows.append((name, spans))
        recorded = [name for name, _ in rows if " measured (" in name]
        measured_s = max(
            (span.end_s for name, spans in rows if name in recorded for span in spans),
            default=0.0,
        )
        # What a rank waits is a part of its own step: the other may be longer.
        step_s = {name: measured_s if name in recorded else predicted_s for name, _ in rows}
        told = (
            f"One step is predicted to take {format_seconds(predicted_s)} and took "
            f"{format_seconds(measured_s)}."
        )
        note = f" Step {step} of the recorded run is the one of median length."
    end_s = max(step_s.values())
    shown, cut = _first_and_last(rows)
    if cut:
        note += (
            f" Of {cut:,} jobs in the middle of the step only the first and the last are drawn: "
            "they repeat."
        )
    data = []
    for kind, (label, color) in _KINDS.items():
        bars = [(name, span) for name, spans in shown for span in spans if span.kind == kind]
        if not bars:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "y": [name for name, _ in bars],
                "base": [_ms(span.start_s) for _, span in bars],
                "x": [_ms(span.end_s - span.start_s) for _, span in bars],
                "text": ["" if span.microbatch < 0 else str(span.microbatch) for _, span in bars],
                "customdata": [[span.name, _ms(span.end_s)] for _, span in bars],
                "hovertemplate": "%{customdata[0]}: %{base:.4~g} to %{customdata[1]:.4~g} ms"
                "<extra>%{y}</extra>",
                "textposition": "inside",
                "insidetextanchor": "middle",
                "constraintext": "inside",
                "textangle": 0,
                "textfont": {"color": "#fff", "size": 11},
                "marker": {"color": COLORS[color], "line": {"width": 0.5, "color": "@surface"}},
            }
        )
    names = [name for name, _ in rows]
    layout = layout_of(
        Axis(title="time from the step's start (ms)", more={"range": [0, _ms(end_s)]}),
        Axis(title="", more={"categoryorder": "array", "categoryarray": names[::-1],
                             "fixedrange": True}),
        height=110 + 34 * len(names),
        barmode="overlay", bargap=0.12, dragmode="zoom",
        uniformtext={"minsize": 9, "mode": "hide"},
    )  # fmt: skip
    idle = {name: 1 - _works(spans) / step_s[name] for name, spans in rows}
    least, most_idle = min(idle, key=idle.__getitem__), max(idle, key=idle.__getitem__)
    waits = (
        f"{most_idle.capitalize()} runs jobs for {1 - idle[most_idle]:.1%} of its step, {least} "
        f"{1 - idle[least]:.1%}."
        if len(rows) > 1
        else f"It runs jobs for {1 - idle[least]:.1%} of it."
    )
    return Chart(
        name="timeline",
        data=data,
        layout=layout,
        summary=f"{told} {waits}{note} Numbers in bars are microbatches.",
        table=Table(
            columns=("", "jobs", "runs them", "waits or sends", "first job", "last job ends"),
            rows=tuple(
                (
                    name,
                    str(len(spans)),
                    format_seconds(_works(spans)),
                    format_seconds(step_s[name] - _works(spans)),
                    format_seconds(spans[0].start_s),
                    format_seconds(spans[-1].end_s),
                )
                for name, spans in rows
            ),
        ),
        zooms=True,
    )


def _of_step(line: RankTimeline, step: int, start_s: float) -> list[Span]:
    """Return a rank's jobs of a step, from its start, in order."""
    spans = [span for span in line.spans if span.step == step and span.kind in _KINDS]
    spans.sort(key=lambda span: span.start_s)
    return [
        Span(
            kind=span.kind,
            name=span.name,
            step=step,
            start_s=span.start_s - start_s,
            end_s=span.end_s - start_s,
            stage=span.stage,
            microbatch=span.microbatch,
        )
        for span in spans
    ]


def _typical_step(measured: Sequence[RankTimeline]) -> int:
    """Return the step of median length, warm-up left out."""
    first = first_steady_step(measured)
    steps = sorted({s.step for line in measured for s in line.spans if s.step >= first})
    seconds = step_seconds(measured, first)
    by_length = sorted(zip(seconds, steps, strict=True))
    return by_length[len(by_length) // 2][1]


def _works(spans: Sequence[Span]) -> float:
    return sum(span.end_s - span.start_s for span in spans if span.kind in (*JOB_KINDS, OPTIMIZER))


def _first_and_last(
    rows: list[tuple[str, list[Span]]],
) -> tuple[list[tuple[str, list[Span]]], int]:
    """Return rows of which no more are left than can be drawn, and how many jobs are not."""
    total = sum(len(spans) for _, spans in rows)
    if total <= MOST_JOBS:
        return rows, 0
    each = max(2, MOST_JOBS // len(rows) // 2)
    kept = [
        (name, spans if len(spans) <= 2 * each else [*spans[:each], *spans[-each:]])
        for name, spans in rows
    ]
    return kept, total - sum(len(spans) for _, spans in kept)


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
