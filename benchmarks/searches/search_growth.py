"""How the time of a search grows: with devices, with layers, and with less memory.

One thing grows at a time, from a Llama-3-8B on 64 devices. Each search runs in a process of
its own after capture, on one core, as those of `search`. `--plot` draws the curves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from benchmarks.harness import Result, benchmark, note
from benchmarks.searches.cases import CASES, Case
from benchmarks.searches.search import H100, searched

GPUS = (8, 64, 512, 4096, 16384, 65536)
LAYERS = (8, 32, 128, 512, 1024)
MEMORY_GIB = (16.0, 24.0, 32.0, 48.0, 80.0)


def growth_cases() -> dict[str, dict[float, Case]]:
    """Return the cases by what grows and how far."""
    base = replace(CASES["llama3-8b@8"], gpus=64, global_batch=1024, goal_s=0.0)
    small = replace(base, hidden=1024, ffn=4096, heads=16, seq_len=1024)
    return {
        "gpus": {n: replace(base, gpus=n, global_batch=max(1024, n)) for n in GPUS},
        "layers": {n: replace(small, layers=n) for n in LAYERS},
        "memory limit, GiB": {n: replace(base, memory_limit_gib=n) for n in MEMORY_GIB},
    }


def write_plot(rows: list[dict], out: Path) -> None:
    """Write seconds against size, a curve for each thing that grows."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names = list(dict.fromkeys(row["grows"] for row in rows))
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=names, shared_yaxes=True)
    for column, name in enumerate(names, start=1):
        mine = [row for row in rows if row["grows"] == name]
        figure.add_trace(
            go.Scatter(
                x=[row["size"] for row in mine],
                y=[row["search_s"] for row in mine],
                text=[f"{row['plan']}<br>{row['candidates']} configurations" for row in mine],
                mode="lines+markers",
                name=name,
            ),
            row=1,
            col=column,
        )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log", title_text="seconds of search", col=1)
    figure.update_layout(title="Seconds of a search after capture, one core", showlegend=False)
    figure.write_html(out, include_plotlyjs=True)


@benchmark("search_growth", quick={"only": "layers", "sizes": 1})
def search_growth(
    *,
    only: Annotated[str | None, "let only this grow"] = None,
    sizes: Annotated[int, "of each, the first"] = max(len(GPUS), len(LAYERS), len(MEMORY_GIB)),
    plot: Annotated[Path | None, "also write a plot to this HTML file"] = None,
    profile: str = H100,
) -> Result:
    rows = []
    for what, cases in growth_cases().items():
        if only in (None, what):
            for size, case in list(cases.items())[:sizes]:
                row = searched(f"{what}={size:g}", case, profile)
                rows.append({"grows": what, "size": size, **row})
                note(rows[-1])
    if plot:
        write_plot(rows, plot)
    return Result(rows)
