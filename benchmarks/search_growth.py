"""How the time of a search grows: with devices, with layers, and with less memory.

    python benchmarks/search_growth.py [--json] [--out growth.html] [--only gpus]

One thing grows at a time, from a Llama-3-8B on 64 devices. Each search runs in a process of
its own after capture, on one core, as in `benchmarks/search.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

# This file's folder comes first on the path, and would hide the package `search` behind it.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

from benchmarks.search import (  # noqa: E402
    CASES,
    Case,
    cached_graph,
    describe,
    in_own_process,
    run_case,
)

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


def measure(what: str, size: float, profile: str) -> dict:
    """Return the row of one case, searched in a process of its own."""
    case = growth_cases()[what][size]
    cached_graph(what, case)
    row = in_own_process(__file__, "--one", what, str(size), "--profile", profile)
    return {"grows": what, "size": size, **row}


def plot(rows: list[dict], out: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--out", type=Path, help="also write a plot to this HTML file")
    parser.add_argument("--only", choices=list(growth_cases()), help="let only this grow")
    parser.add_argument("--profile", default="h100-sxm5-80gb")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = growth_cases()
    if options.one:
        what, size = options.one[0], float(options.one[1])
        print(json.dumps(run_case(f"{what}={size:g}", cases[what][size], options.profile)))
        return
    rows = []
    for what in [options.only] if options.only else list(cases):
        for size in cases[what]:
            rows.append(measure(what, size, options.profile))
            if not options.json:
                print(describe(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    if options.out:
        plot(rows, options.out)


if __name__ == "__main__":
    main()
