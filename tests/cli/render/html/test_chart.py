"""The form of a chart: axes with units, and what a reader may pick."""

from __future__ import annotations

from commands.render.html.chart import COLORS, Axis, Chart, Table, layout_of


def test_each_axis_has_its_own_title_and_properties():
    layout = layout_of(
        Axis(title="ms of a step", more={"range": [0, 3]}), Axis(title="GiB"), height=120,
        barmode="stack",
    )  # fmt: skip
    assert layout["xaxis"]["title"]["text"] == "ms of a step"
    assert layout["xaxis"]["range"] == [0, 3]
    assert layout["yaxis"]["title"]["text"] == "GiB"
    assert "range" not in layout["yaxis"]
    assert (layout["height"], layout["barmode"]) == (120, "stack")
    # The legend lies above the picture: it hides no mark, however many traces there are.
    assert layout["legend"]["y"] > 1
    assert layout["legend"]["yanchor"] == "bottom"


def test_a_property_given_last_is_used():
    layout = layout_of(Axis(title=""), Axis(title=""), height=1, hovermode="x unified")
    assert layout["hovermode"] == "x unified"


def test_a_figure_is_the_traces_and_the_layout():
    table = Table(columns=("a",), rows=(("1",),))
    chart = Chart(name="n", data=[{"x": [1]}], layout={"height": 3}, summary="s", table=table)
    assert chart.figure == {"data": [{"x": [1]}], "layout": {"height": 3}}


def test_colours_are_told_apart():
    assert len({*COLORS.values()}) == len(COLORS)
