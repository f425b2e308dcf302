"""A chart of the report: a figure for plotly, a sentence, and the same numbers as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INK, FAINT, SURFACE = "@ink", "@faint", "@surface"
"""Colours that the page takes from its light or dark style."""

COLORS = {
    "blue": "#4a82c4",
    "orange": "#e08a2e",
    "green": "#4c9f61",
    "purple": "#9a6fb0",
    "red": "#cf5b57",
    "teal": "#3f9c9c",
    "brown": "#a07855",
    "gray": "#8b929b",
    "yellow": "#c9a72c",
}
"""Of middle lightness: they are told apart on white and on black."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers as text."""

    columns: tuple[str, ...]
    """Headings."""
    rows: tuple[tuple[str, ...], ...]
    """Cells, as many a row as there are columns."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A list from which the reader picks what a chart shows."""

    label: str
    """What is chosen."""
    options: tuple[str, ...]
    """The options; the first is shown."""
    traces: tuple[tuple[int, ...], ...]
    """Traces of the figure that each option shows; those of no option are always there."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart and its text."""

    name: str
    """Its id in the page."""
    data: list[dict[str, Any]]
    """Traces for plotly."""
    layout: dict[str, Any]
    """Layout for plotly; colours of text and grid are the page's."""
    summary: str
    """What it shows, in a sentence or two, with the numbers that matter."""
    table: Table
    """The same numbers."""
    zooms: bool = False
    """Whether buttons beside it zoom and move along x."""
    choice: Choice | None = None
    """What of it is shown, if there is more than one thing."""

    @property
    def figure(self) -> dict[str, Any]:
        """The figure as plotly takes it."""
        return {"data": self.data, "layout": self.layout}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a figure."""

    title: str
    """With the unit."""
    more: dict[str, Any] = field(default_factory=dict)
    """Other properties of plotly's axis."""

    def to_plotly(self) -> dict[str, Any]:
        """Return it as plotly takes it."""
        return {
            "title": {"text": self.title, "font": {"size": 13}},
            "automargin": True,
            **self.more,
        }


def layout_of(x: Axis, y: Axis, *, height: int, **more: Any) -> dict[str, Any]:
    """Return the layout of a figure with two axes and its legend above."""
    return {
        "xaxis": x.to_plotly(),
        "yaxis": y.to_plotly(),
        "height": height,
        "margin": {"l": 10, "r": 16, "t": 36, "b": 10},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "itemsizing": "constant",
            "traceorder": "normal",
        },
        "hovermode": "closest",
        **more,
    }
