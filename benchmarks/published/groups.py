"""Rankings of measured runs by group, and a plot of predicted against measured steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from costmodel.table.rows.run_row import RunRow

LEAST_LAYOUTS = 2
"""Layouts of a group that can be ranked."""


class Ranked(Protocol):
    """A measured run, and what it can be compared with."""

    run: RunRow
    source: str
    group: tuple
    nodes: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How well the layouts of one model on one machine and batch are ranked."""

    source: str
    """Where the runs were published."""
    model: str
    """The model's name."""
    nodes: int
    """Nodes of the machine."""
    layouts: int
    """Runs that are ranked."""
    kendall_tau: float
    """Pairs that are ordered alike minus the others, over all pairs."""
    regret: float
    """Measured step of the layout predicted to be best, over that of the best, minus 1."""


def kendall_tau(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Agreement of two rankings: pairs ordered alike minus otherwise, over all pairs."""
    first, second = np.triu_indices(len(measured), k=1)
    signs = np.sign(predicted[first] - predicted[second]) * np.sign(
        measured[first] - measured[second]
    )
    return float(signs.mean())


def rankings(cases: Sequence[Ranked], errors: np.ndarray) -> list[Ranking]:
    """Return a ranking of each group of several layouts; `errors` are relative, a case each."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        groups[case.group].append(index)
    found = []
    for group, members in groups.items():
        if len(members) < LEAST_LAYOUTS:
            continue
        measured = np.array([cases[i].step_s for i in members])
        predicted = measured * (1 + errors[members])
        found.append(
            Ranking(
                source=cases[members[0]].source,
                model=str(group[1]),
                nodes=cases[members[0]].nodes,
                layouts=len(members),
                kendall_tau=kendall_tau(predicted, measured),
                regret=float(measured[predicted.argmin()] / measured.min() - 1),
            )
        )
    return found


def write_plot(cases: Sequence[Ranked], errors: np.ndarray, path: Path) -> None:
    """Write a page that plots predicted over measured steps by source, and errors by nodes."""
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        cols=2,
        subplot_titles=("predicted against measured step (s)", "predicted / measured by nodes"),
    )
    measured = np.array([case.step_s for case in cases])
    layouts = [
        f"dp {case.run.dp} tp {case.run.tp} pp {case.run.pp} of {case.run.micro_batch}"
        for case in cases
    ]
    for number, source in enumerate(dict.fromkeys(case.source for case in cases)):
        mine = [i for i, case in enumerate(cases) if case.source == source]
        shared = {
            "mode": "markers",
            "name": source,
            "legendgroup": source,
            "text": [layouts[i] for i in mine],
            "marker": {"size": 5, "symbol": number % 8},
        }
        predicted = measured[mine] * (1 + errors[mine])
        figure.add_trace(go.Scatter(x=measured[mine], y=predicted, **shared), row=1, col=1)
        nodes = [cases[i].nodes for i in mine]
        figure.add_trace(
            go.Scatter(x=nodes, y=1 + errors[mine], showlegend=False, **shared), row=1, col=2
        )
    ends = [float(measured.min()), float(measured.max())]
    figure.add_trace(
        go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "gray"}), row=1, col=1
    )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    figure.write_html(str(path), include_plotlyjs=True)
