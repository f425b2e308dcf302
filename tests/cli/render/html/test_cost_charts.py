"""Charts of costs: every part of the work is there, in the unit that the axis says."""

from __future__ import annotations

import pytest

from commands.render.html.cost_charts import (
    _WORK_COLORS,
    MOST_OPS,
    cost_chart,
    roofline_chart,
    trade_off_chart,
)
from costmodel.time.roofline import RooflinePoint
from planner.units import GIB
from search.report.words import PART_WORDS
from tests.cli.render.views import overview, step_path


def traces(chart):
    return {trace["name"]: trace for trace in chart.data}


def cells(chart):
    """Cells of a chart's table, by the name of the row and of the column."""
    return {
        row[0]: dict(zip(chart.table.columns[1:], row[1:], strict=True)) for row in chart.table.rows
    }


def test_each_kind_of_work_is_a_bar_in_milliseconds():
    chart = cost_chart(step_path())
    found = traces(chart)
    assert [*found] == ["compute", "tensor parallel messages", "waits"]  # none of what is 0
    assert found["compute"]["x"] == [5e3, 7e3]
    assert found["waits"]["x"] == [4e3, 1e3]
    assert all(trace["y"] == ["rank 0", "rank 1"] for trace in found.values())
    assert "ms" in chart.layout["xaxis"]["title"]["text"]
    # The bars of a rank add up to the step.
    assert [sum(each) for each in zip(*(t["x"] for t in found.values()), strict=True)] == [1e4] * 2
    assert chart.layout["barmode"] == "stack"
    # Plotly draws the first category lowest.
    assert chart.layout["yaxis"]["categoryarray"] == ["rank 1", "rank 0"]


def test_the_text_of_costs_says_the_slowest_rank_and_the_mean():
    chart = cost_chart(step_path())
    assert "Rank 1 works longest, 9 s of 10 s" in chart.summary
    assert "on average ranks work 75.0% of the step" in chart.summary
    assert cells(chart)["rank 0"] == {
        "compute": "5 s", "tensor parallel messages": "1 s", "waits": "4 s", "works": "6 s"
    }  # fmt: skip


def test_ranks_that_never_wait_have_no_bar_of_waiting():
    path = step_path(
        work_s={"compute_s": 5.0}, by_rank_s={"compute_s": (5.0,)}, imbalance_s=0.0,
        fill_drain_s=0.0, messages_s=0.0, inputs_s=0.0,
    )  # fmt: skip
    assert [*traces(cost_chart(path))] == ["compute"]


def test_every_kind_of_work_has_a_colour_of_its_own():
    assert {*_WORK_COLORS} <= {*PART_WORDS}
    assert len({*_WORK_COLORS.values()}) == len(_WORK_COLORS)


def point(**changes) -> RooflinePoint:
    """4e12 flop and 1e10 bytes in 0.1 s: 400 flop per byte, 40 TFLOP/s."""
    parts = {
        "op": "aten.mm.default", "block_class": "layers", "direction": "forward",
        "dtype": "bfloat16", "calls": 3, "flop": 4e12, "num_bytes": 1e10, "seconds": 0.1,
    }  # fmt: skip
    return RooflinePoint(**(parts | changes))


PEAKS = {"bfloat16": 1e14, "float32": 5e13}


def roofline(points):
    return roofline_chart(points, memory_bytes_per_s=1e12, peaks=PEAKS)


def test_a_roof_rises_with_memory_to_the_peak_of_its_dtype():
    """100 TFLOP/s and 1 TB/s: the ridge is at 100 flop per byte."""
    found = traces(roofline([point(), point(direction="backward", flop=1e11)]))
    roof = found["roof of bfloat16"]
    assert "roof of float32" not in found  # no op computes in it
    assert roof["x"][1] == pytest.approx(100)
    assert roof["y"][1:] == pytest.approx([100, 100])
    low = roof["x"][0]
    assert roof["y"][0] == pytest.approx(low)  # 1 TB/s: as many TFLOP/s as flop per byte
    assert low < 10  # below the op of the least intensity
    assert roof["x"][2] > 400
    for axis in ("xaxis", "yaxis"):
        assert roofline([point()]).layout[axis]["type"] == "log"


def test_ops_lie_at_their_intensity_and_rate():
    chart = roofline([point(), point(direction="backward", flop=1e11, seconds=0.3)])
    found = traces(chart)
    assert found["forward"]["x"] == [400]
    assert found["forward"]["y"] == [pytest.approx(40)]
    assert found["backward"]["x"] == [10]
    assert found["forward"]["customdata"] == ["25.0%"]
    assert found["backward"]["marker"]["size"] == [pytest.approx(0.75)]  # an area
    assert chart.layout["xaxis"]["title"]["text"] == "flop per byte moved"
    assert chart.layout["yaxis"]["title"]["text"] == "TFLOP/s"


def test_the_text_of_a_roofline_says_the_largest_op_and_what_memory_bounds():
    chart = roofline([point(), point(op="aten.add.Tensor", flop=1e11, seconds=0.3)])
    assert "mm in layers (forward), takes 25% of the ops' time at 40 TFLOP/s" in chart.summary
    assert "40% of the peak" in chart.summary
    assert "75% of the time is in ops that memory bounds" in chart.summary
    assert chart.table.rows[0] == ("mm", "layers", "forward", "3", "100 ms", "400", "40")
    assert chart.table.rows[1][0] == "add"


def test_ops_without_arithmetic_are_in_the_table_alone():
    chart = roofline([point(flop=0.0, op="aten.copy_.default")])
    assert chart.data == []
    assert "No op of it counts as arithmetic" in chart.summary
    assert chart.table.rows[0][0] == "copy_"
    many = roofline([point(op=f"aten.op{i}.default") for i in range(MOST_OPS + 5)])
    assert len(many.table.rows) == len(traces(many)["forward"]["x"]) == MOST_OPS


RUNNERS = [{"label": "dp 4", "step_s": 12.0, "peak_bytes": 5 * GIB}]
FRONT = [
    {"label": "lean", "step_s": 20.0, "peak_bytes": 2 * GIB},
    {"label": "middle", "step_s": 15.0, "peak_bytes": 3 * GIB},
]


def test_plans_lie_at_their_seconds_and_gib():
    chart = trade_off_chart(overview(), "tp 2 x pp 2", RUNNERS, FRONT)
    found = traces(chart)
    assert found["this plan"]["x"] == [10.0]
    assert found["this plan"]["y"] == [6.0]
    assert found["this plan"]["text"] == ["tp 2 x pp 2"]
    assert found["runners-up"]["y"] == [5.0]
    front = found["front: faster needs more memory"]
    assert (front["x"], front["y"]) == ([15.0, 20.0], [3.0, 2.0])  # a line from left to right
    assert found["limit"]["y"] == [8.0, 8.0]  # of the device that may hold the least
    assert found["limit"]["x"][0] < 10 < 20 < found["limit"]["x"][1]
    assert "seconds" in chart.layout["xaxis"]["title"]["text"]
    assert "GiB" in chart.layout["yaxis"]["title"]["text"]


def test_the_text_of_a_trade_off_says_this_plan_and_the_leanest():
    chart = trade_off_chart(overview(), "tp 2 x pp 2", RUNNERS, FRONT)
    assert "This plan: 10 s, 6.00 GiB." in chart.summary
    assert "The leanest plan of the front needs 2.00 GiB and 20 s." in chart.summary
    assert chart.table.rows == (
        ("this plan", "tp 2 x pp 2", "10 s", "6.00 GiB"),
        ("front", "middle", "15 s", "3.00 GiB"),
        ("front", "lean", "20 s", "2.00 GiB"),
        ("runner-up", "dp 4", "12 s", "5.00 GiB"),
    )
    alone = trade_off_chart(overview(), "tp 2 x pp 2", [], [])
    assert "search with --pareto front.json" in alone.summary
    assert [*traces(alone)] == ["this plan", "limit"]
