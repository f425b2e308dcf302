"""Charts of what a step costs: by rank and kind of work, by op, and against other plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commands.render.html.chart import COLORS, INK, Axis, Chart, Table, layout_of
from costmodel.time.roofline import RooflinePoint
from costmodel.time.step_path import StepPath
from planner.units import GIB, TFLOP, format_bytes, format_seconds
from search.report.overview import Overview
from search.report.words import PART_WORDS

_WORK_COLORS = {
    "compute_s": "blue",
    "recompute_s": "yellow",
    "host_s": "red",
    "tp_comm_s": "orange",
    "dp_comm_s": "teal",
    "waited_s": "brown",
    "offload_s": "green",
    "optimizer_s": "purple",
}

LEGEND_LINE = 19
"""Height of a line of a legend."""
MOST_OPS = 60
"""Kinds of ops that are drawn, the longest first."""
LEAST_INTENSITY = 1e-3
"""Flop per byte: what computes less only moves bytes, and would stretch the picture."""


def cost_chart(path: StepPath) -> Chart:
    """Return the work of each pp rank by kind, and what it waits."""
    kinds = [name for name, seconds in path.by_rank_s.items() if any(seconds)]
    ranks = [f"rank {rank}" for rank in range(len(path.rank_work_s))]
    waits = [max(0.0, path.step_s - work) for work in path.rank_work_s]
    rows: dict[str, Sequence[float]] = {name: path.by_rank_s[name] for name in kinds}
    labels = {name: PART_WORDS[name] for name in kinds}
    if any(wait > 1e-6 * path.step_s for wait in waits):
        rows["waits"], labels["waits"] = waits, "waits"
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": labels[name],
            "y": ranks,
            "x": [second * 1e3 for second in seconds],
            "marker": {"color": COLORS[_WORK_COLORS.get(name, "gray")]},
            "hovertemplate": "%{x:.4~g} ms<extra>%{y}: " + labels[name] + "</extra>",
        }
        for name, seconds in rows.items()
    ]
    slowest = path.bottleneck
    told = f"Rank {slowest} works longest, {format_seconds(path.rank_work_s[slowest])} of "
    told += f"{format_seconds(path.step_s)}"
    return Chart(
        name="costs",
        data=data,
        layout=layout_of(
            Axis(title="ms of a step"),
            Axis(title="", more={"categoryarray": ranks[::-1], "categoryorder": "array"}),
            # (Of half a page's width: two kinds stand in a line of the legend.)
            height=110 + 34 * len(ranks) + LEGEND_LINE * (len(rows) // 2),
            barmode="stack",
        ),
        summary=f"{told}; {_of_all(path)}",
        table=Table(
            columns=("", *labels.values(), "works"),
            rows=tuple(
                (name, *(format_seconds(rows[kind][rank]) for kind in rows),
                 format_seconds(path.rank_work_s[rank]))
                for rank, name in enumerate(ranks)
            ),
        ),
    )  # fmt: skip


def _of_all(path: StepPath) -> str:
    share = sum(path.rank_work_s) / len(path.rank_work_s) / path.step_s
    return f"on average ranks work {share:.1%} of the step."


def roofline_chart(
    points: Sequence[RooflinePoint], *, memory_bytes_per_s: float, peaks: Mapping[str, float]
) -> Chart:
    """Return ops by intensity and rate under the roofs of their dtypes."""
    drawn = [point for point in points if point.intensity >= LEAST_INTENSITY][:MOST_OPS]
    total_s = sum(point.seconds for point in points) or 1.0
    data: list[dict[str, Any]] = []
    dtypes = [dtype for dtype in dict.fromkeys(point.dtype for point in drawn) if dtype in peaks]
    most = max((point.intensity for point in drawn), default=1.0)
    least = min((point.intensity for point in drawn), default=1.0)
    for number, dtype in enumerate(dtypes):
        ridge = peaks[dtype] / memory_bytes_per_s
        low, high = min(least, ridge) / 3, max(most, ridge) * 3
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"roof of {dtype}",
                "x": [low, ridge, high],
                "y": [low * memory_bytes_per_s / TFLOP, *[peaks[dtype] / TFLOP] * 2],
                "line": {"color": INK, "width": 1.5, "dash": ("solid", "dash", "dot")[number % 3]},
                "hovertemplate": "%{y:.4~g} TFLOP/s at %{x:.4~g} flop/byte",
            }
        )
    for direction, color in (("forward", "blue"), ("backward", "orange")):
        mine = [point for point in drawn if point.direction == direction]
        if not mine:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": direction,
                "x": [point.intensity for point in mine],
                "y": [point.flop_per_s / TFLOP for point in mine],
                "text": [f"{_op(point)}, {point.block_class}" for point in mine],
                "customdata": [f"{point.seconds / total_s:.1%}" for point in mine],
                "marker": {
                    "color": COLORS[color],
                    "opacity": 0.75,
                    "sizemode": "area",
                    "size": [max(0.003, point.seconds / total_s) for point in mine],
                    "sizeref": 2 * 0.4 / 46**2,
                    "sizemin": 4,
                    "line": {"color": "@surface", "width": 1},
                },
                "hovertemplate": "%{text}<br>%{y:.4~g} TFLOP/s at %{x:.4~g} flop/byte<br>"
                "%{customdata} of the ops' time<extra></extra>",
            }
        )
    summary = "No op of it counts as arithmetic."
    if drawn:
        longest = drawn[0]
        summary = (
            f"The largest, {_op(longest)} in {longest.block_class} ({longest.direction}), takes "
            f"{longest.seconds / total_s:.0%} of the ops' time at "
            f"{longest.flop_per_s / TFLOP:.3g} TFLOP/s"
        )
        if longest.dtype in peaks:
            summary += f", {longest.flop_per_s / peaks[longest.dtype]:.0%} of the peak"
        bound = sum(
            point.seconds
            for point in points
            if point.intensity < peaks.get(point.dtype, 0) / memory_bytes_per_s
        )
        summary += f"; {bound / total_s:.0%} of the time is in ops that memory bounds."
    return Chart(
        name="roofline",
        data=data,
        layout=layout_of(
            Axis(title="flop per byte moved", more={"type": "log"}),
            Axis(title="TFLOP/s", more={"type": "log"}),
            height=440,
        ),
        summary=summary + " Areas are the time of a step; each op is priced alone.",
        table=Table(
            columns=("op", "in", "direction", "calls", "time", "flop/byte", "TFLOP/s"),
            rows=tuple(
                (
                    _op(point),
                    point.block_class,
                    point.direction,
                    str(point.calls),
                    format_seconds(point.seconds),
                    f"{point.intensity:.3g}",
                    f"{point.flop_per_s / TFLOP:.3g}",
                )
                for point in points[:MOST_OPS]
            ),
        ),
    )


def _op(point: RooflinePoint) -> str:
    return point.op.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")


def trade_off_chart(
    overview: Overview,
    chosen: str,
    runners_up: Sequence[Mapping[str, Any]],
    front: Sequence[Mapping[str, Any]],
) -> Chart:
    """Return the plan, those that lost, and the front of time against memory, if it was sought."""
    data: list[dict[str, Any]] = []
    rows = [("this plan", chosen, overview.step_s, float(overview.peak_bytes))]
    if front:
        points = sorted(front, key=lambda point: point["step_s"])
        data.append(_points("front: faster needs more memory", "teal", points, "lines+markers"))
        rows += [("front", p["label"], p["step_s"], p["peak_bytes"]) for p in points]
    if runners_up:
        data.append(_points("runners-up", "orange", runners_up, "markers"))
        rows += [("runner-up", p["label"], p["step_s"], p["peak_bytes"]) for p in runners_up]
    data.append(
        {
            **_points(
                "this plan",
                "red",
                [
                    {
                        "label": chosen,
                        "step_s": overview.step_s,
                        "peak_bytes": overview.peak_bytes,
                    }
                ],
                "markers",
            ),
            "marker": {"color": COLORS["red"], "symbol": "star", "size": 17},
        }
    )
    limit = min(overview.limit_bytes) / GIB
    last = max(row[2] for row in rows)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "limit",
            "x": [min(row[2] for row in rows) * 0.98, last * 1.02],
            "y": [limit, limit],
            "line": {"color": INK, "dash": "dash", "width": 1.5},
            "hovertemplate": "%{y:.2f} GiB",
        }
    )
    summary = f"This plan: {format_seconds(overview.step_s)}, {format_bytes(overview.peak_bytes)}. "
    others = [p for p in front if p["peak_bytes"] < overview.peak_bytes]
    if others:
        least = min(others, key=lambda p: p["peak_bytes"])
        summary += (
            f"The leanest plan of the front needs {format_bytes(least['peak_bytes'])} and "
            f"{format_seconds(least['step_s'])}."
        )
    elif not front:
        summary += (
            "The file has no front of time against memory: search with --pareto front.json to "
            "have it drawn."
        )
    return Chart(
        name="tradeoff",
        data=data,
        layout=layout_of(
            Axis(title="seconds of a step"),
            Axis(title="GiB of the fullest device", more={"rangemode": "normal"}),
            height=400,
        ),
        summary=summary,
        table=Table(
            columns=("", "plan", "step", "memory"),
            rows=tuple(
                (kind, label, format_seconds(step_s), format_bytes(peak))
                for kind, label, step_s, peak in rows
            ),
        ),
    )


def _points(
    name: str, color: str, points: Sequence[Mapping[str, Any]], mode: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [point["step_s"] for point in points],
        "y": [point["peak_bytes"] / GIB for point in points],
        "text": [point["label"] for point in points],
        "marker": {"color": COLORS[color], "size": 10},
        "line": {"color": COLORS[color], "shape": "hv", "width": 1.5},
        "hovertemplate": "%{text}<br>%{x:.4~g} s, %{y:.2f} GiB<extra></extra>",
    }
