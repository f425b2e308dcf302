"""Charts over time: jobs where they ran, and memory in its parts against the limit."""

from __future__ import annotations

import pytest

from commands.render.html import timeline_charts
from commands.render.html.timeline_charts import _MEMORY_COLORS, memory_chart, timeline_chart
from costmodel.memory.exact.over_time import MemoryMoment
from costmodel.memory.parts import MemoryParts
from planner.timeline import RankTimeline, Span
from planner.units import GIB
from search.report.words import MEMORY_WORDS


def span(kind, start_s, end_s, *, step=0, microbatch=0) -> Span:
    return Span(
        kind=kind, name=f"{kind}0.{microbatch}", step=step, start_s=start_s, end_s=end_s,
        stage=0, microbatch=microbatch,
    )  # fmt: skip


def line(pp_rank, *spans, rank=None, offset_s=0.0) -> RankTimeline:
    rank = pp_rank if rank is None else rank
    return RankTimeline(rank=rank, pp_rank=pp_rank, clock_offset_s=offset_s, spans=spans)


PREDICTED = (
    line(0, span("F", 0.0, 0.1), span("B", 0.3, 0.5), span("O", 0.5, 0.6, microbatch=-1)),
    line(1, span("F", 0.1, 0.2), span("I", 0.2, 0.25), span("W", 0.25, 0.3)),
)


def traces(chart):
    return {trace["name"]: trace for trace in chart.data}


def cells(chart):
    return {
        row[0]: dict(zip(chart.table.columns[1:], row[1:], strict=True)) for row in chart.table.rows
    }


def test_each_job_is_a_bar_from_its_start_as_long_as_it_takes():
    chart = timeline_chart(PREDICTED, ())
    found = traces(chart)
    assert [*found] == [
        "forward", "backward", "backward of inputs", "weight gradients", "optimizer"
    ]  # fmt: skip
    assert found["forward"]["base"] == [0, 100]
    assert found["forward"]["x"] == [100, 100]
    assert found["forward"]["y"] == ["rank 0", "rank 1"]
    assert (found["backward"]["base"], found["backward"]["x"]) == ([300], [200])
    assert found["backward"]["customdata"] == [["B0.0", 500]]  # its end
    assert found["optimizer"]["text"] == [""]  # of no microbatch
    assert "(ms)" in chart.layout["xaxis"]["title"]["text"]
    assert chart.layout["xaxis"]["range"] == [0, 600]
    assert chart.layout["yaxis"]["categoryarray"] == ["rank 1", "rank 0"]
    assert len({trace["marker"]["color"] for trace in chart.data}) == len(chart.data)


def test_the_text_says_the_step_and_who_works_most():
    """Rank 0 works 0.4 s of 0.6 s; rank 1 0.2 s."""
    chart = timeline_chart(PREDICTED, ())
    assert "One step takes 600 ms." in chart.summary
    assert "Rank 1 runs jobs for 33.3% of its step, rank 0 66.7%." in chart.summary
    assert cells(chart)["rank 1"] == {
        "jobs": "3", "runs them": "200 ms", "waits or sends": "400 ms", "first job": "100 ms",
        "last job ends": "300 ms", "exchanges, exposed": "", "exchanges, beside compute": "",
    }  # fmt: skip


def exchanged(lane, start_s, end_s, *, hidden_s=0.0, kind="COLLECTIVE", **more) -> Span:
    return Span(
        kind=kind, name="collectives", step=0, start_s=start_s, end_s=end_s, lane=lane,
        hidden_s=hidden_s, **more,
    )  # fmt: skip


def test_below_a_ranks_jobs_lies_what_it_exchanges_a_row_for_each_lane():
    predicted = (
        line(
            0,
            *PREDICTED[0].spans,
            exchanged("tp", 0.05, 0.1, hidden_s=0.02, number=4, num_bytes=2**20, microbatch=0),
            exchanged("dp", 0.4, 0.5),
        ),
        line(
            1,
            *PREDICTED[1].spans,
            exchanged("pp from 0", 0.1, 0.15, hidden_s=0.05, kind="MESSAGE"),
        ),
    )
    chart = timeline_chart(predicted, ())
    names = ["rank 0", "rank 0 tp", "rank 0 dp", "rank 1", "rank 1 pp"]
    assert chart.layout["yaxis"]["categoryarray"] == names[::-1]
    found = traces(chart)
    beside, exposed = found["exchanges beside compute"], found["exchanges, exposed"]
    assert (beside["y"], beside["base"], beside["x"]) == (
        ["rank 0 tp", "rank 1 pp"], [50, 100], [50, 50]
    )  # fmt: skip
    # What is exposed lies over its end.
    assert (exposed["y"], exposed["base"], exposed["x"]) == (
        ["rank 0 tp", "rank 0 dp"], [70, 400], [30, 100]
    )  # fmt: skip
    assert exposed["customdata"][0] == ["4 collectives, 1.00 MiB, microbatch 0", 20, 30]
    assert len({trace["marker"]["color"] for trace in chart.data}) == len(chart.data)
    assert "Within a predicted job only its sums by axis are known" in chart.summary
    assert cells(chart)["rank 0"]["exchanges, exposed"] == "tp 30 ms, dp 100 ms"
    assert cells(chart)["rank 0"]["exchanges, beside compute"] == "tp 20 ms, dp 0 s"


def test_what_ran_beside_a_recorded_collective_is_not_exposed():
    """From 0.1 to 0.4, with two stretches of compute in it; the last one of another collective."""
    spans = (
        span("B", 0.0, 1.0),
        exchanged("tp", 0.1, 0.4),
        *(span("BESIDE", *at) for at in ((0.15, 0.2), (0.3, 0.35), (0.6, 0.7))),
        exchanged("tp", 0.5, 0.75),
        exchanged("", 0.9, 1.0, kind="WAIT"),
    )
    found = timeline_chart((line(0, *spans),), ())
    assert traces(found)["exchanges, exposed"]["base"] == pytest.approx(
        [100, 200, 350, 500, 700, 900]
    )
    assert traces(found)["exchanges, exposed"]["x"] == pytest.approx([50, 100, 50, 100, 50, 100])
    assert found.layout["yaxis"]["categoryarray"] == ["rank 0 pp", "rank 0 tp", "rank 0"]
    assert cells(found)["rank 0"]["exchanges, beside compute"] == "tp 200 ms, pp 0 s"


def test_lanes_of_many_ranks_are_those_of_the_first_and_the_last(monkeypatch):
    monkeypatch.setattr(timeline_charts, "MOST_LANES", 2)
    lines = [line(rank, span("F", 0, 1), exchanged("tp", 0.5, 1.0)) for rank in range(4)]
    names = timeline_chart(lines, ()).layout["yaxis"]["categoryarray"]
    assert names[::-1] == ["rank 0", "rank 0 tp", "rank 1", "rank 2", "rank 3", "rank 3 tp"]


def recorded(offset_s=0.0, *, rank=0, pp_rank=0):
    """Steps 0 to 4; the steady ones take 1.0, 3.0 and 2.0 s of rank 0's clock from 100 s on."""
    spans = []
    for step, seconds in enumerate((9.0, 9.0, 1.0, 3.0, 2.0)):
        start_s = 100.0 * (step + 1) - offset_s
        spans.append(span("F", start_s + 0.2, start_s + 0.5, step=step))
        spans.append(span("B", start_s + 0.5, start_s + seconds, step=step))
        spans.append(span("WAIT", start_s, start_s + 0.2, step=step))
    return line(pp_rank, *spans, rank=rank, offset_s=offset_s)


def test_a_recorded_step_of_median_length_lies_beside_the_predicted_one(monkeypatch):
    monkeypatch.setattr("costmodel.compare.WARM_UP_STEPS", 2)
    chart = timeline_chart(PREDICTED[:1], (recorded(), recorded(7.0, rank=5)))
    found = traces(chart)
    assert "Step 4 of the recorded run is the one of median length" in chart.summary
    names = ["rank 0 predicted", "rank 0 measured (0)", "rank 0 measured (0) pp",
             "rank 0 measured (5)", "rank 0 measured (5) pp"]  # fmt: skip
    assert chart.layout["yaxis"]["categoryarray"] == names[::-1]
    # On one clock both start at once; what they waited lies in a lane.
    assert found["exchanges, exposed"]["x"] == pytest.approx([200, 200])
    assert found["forward"]["base"] == pytest.approx([0, 200, 200])
    assert found["backward"]["x"] == pytest.approx([200, 1500, 1500])
    assert chart.layout["xaxis"]["range"] == [0, 2000]


def test_what_a_rank_waits_is_a_part_of_its_own_step(monkeypatch):
    """0.4 of 0.6 s as predicted, 1.8 of 2.0 s as recorded: the longer step is of the run alone."""
    monkeypatch.setattr("costmodel.compare.WARM_UP_STEPS", 2)
    chart = timeline_chart(PREDICTED[:1], (recorded(),))
    assert "One step is predicted to take 600 ms and took 2 s." in chart.summary
    assert cells(chart)["rank 0 predicted"]["waits or sends"] == "200 ms"
    assert cells(chart)["rank 0 measured (0)"]["waits or sends"] == "200 ms"
    assert (
        "Rank 0 predicted runs jobs for 66.7% of its step, rank 0 measured (0) 90.0%"
        in chart.summary
    )


def test_a_rank_that_lacks_the_step_has_no_row(monkeypatch):
    monkeypatch.setattr("costmodel.compare.WARM_UP_STEPS", 2)
    killed = line(0, span("F", 100.0, 101.0, step=0), rank=1)
    chart = timeline_chart(PREDICTED[:1], (recorded(), killed))
    assert [*cells(chart)] == ["rank 0 predicted", "rank 0 measured (0)"]


def test_of_too_many_jobs_the_first_and_the_last_are_drawn(monkeypatch):
    monkeypatch.setattr(timeline_charts, "MOST_JOBS", 10)
    jobs = [span("F", i / 10, (i + 1) / 10, microbatch=i) for i in range(30)]
    chart = timeline_chart((line(0, *jobs),), ())
    (drawn,) = chart.data
    assert drawn["text"] == [*"01234", "25", "26", "27", "28", "29"]
    assert "Of 20 jobs in the middle of the step only the first and the last" in chart.summary
    assert cells(chart)["rank 0"]["jobs"] == "30"


def moment(start_s, end_s, job="F0.0", **gib) -> MemoryMoment:
    parts = {f"{name}_bytes": int(size * GIB) for name, size in gib.items()}
    return MemoryMoment(start_s=start_s, end_s=end_s, job=job, parts=MemoryParts(**parts))


OVER_TIME = (
    (moment(0.0, 0.1, parameter=2, activation=1), moment(0.1, 0.3, parameter=2)),
    (moment(0.0, 0.2, parameter=3), moment(0.2, 0.3, "B1.0", parameter=3, activation=2)),
)


def test_memory_is_stacked_in_gib_over_milliseconds():
    chart = memory_chart(OVER_TIME, (8.0 * GIB, 4.0 * GIB))
    held = [trace for trace in chart.data if trace["name"] != "limit"]
    # The fullest rank first; what lies there all the time is lowest.
    assert [(trace["stackgroup"], trace["name"]) for trace in held] == [
        ("rank 1", "weights"), ("rank 1", "activations"),
        ("rank 0", "weights"), ("rank 0", "activations"),
    ]  # fmt: skip
    assert [trace["visible"] for trace in held] == [True, True, False, False]
    assert held[1]["x"] == [0, 200, 300]
    assert held[1]["y"] == [0, 2, 2]  # a job's height until its end
    assert traces(chart)["limit"]["y"] == [4, 4]
    assert traces(chart)["limit"]["x"] == [0, 300]
    assert chart.choice is not None
    assert chart.choice.options == ("rank 1", "rank 0")
    assert chart.choice.traces == ((0, 1), (2, 3))
    assert "GiB" in chart.layout["yaxis"]["title"]["text"]
    assert "(ms)" in chart.layout["xaxis"]["title"]["text"]


def test_the_text_of_memory_says_the_fullest_moment_and_its_distance_to_the_limit():
    chart = memory_chart(OVER_TIME, (8.0 * GIB, 4.0 * GIB))
    assert "Rank 1 is the fullest: 5.00 GiB during B1.0" in chart.summary
    assert "1.00 GiB OVER the limit of 4.00 GiB" in chart.summary
    assert "3.00 GiB under" in memory_chart(OVER_TIME, (8.0 * GIB, 8.0 * GIB)).summary
    assert cells(chart)["rank 0"] == {
        "during": "F0.0", "weights": "2.00 GiB", "activations": "1.00 GiB", "total": "3.00 GiB"
    }  # fmt: skip


def test_of_many_moments_the_fullest_of_each_few_is_drawn(monkeypatch):
    monkeypatch.setattr(timeline_charts, "MOST_MOMENTS", 2)
    over_time = [moment(i / 10, (i + 1) / 10, activation=i % 3 + 1) for i in range(6)]
    chart = memory_chart((over_time,), (8.0 * GIB,))
    assert chart.data[0]["y"] == [3, 3, 3]
    assert chart.choice is None


def test_every_part_of_memory_has_a_word_and_a_colour():
    assert {*_MEMORY_COLORS} == {*MEMORY_WORDS}
    assert len({*_MEMORY_COLORS.values()}) == len(_MEMORY_COLORS)
