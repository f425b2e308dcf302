"""The report as a file: numbers in, one HTML text out that needs nothing else.

The style, the script and plotly's own script are put into the text, so it works offline and can be
sent to a colleague. What the page shows moves with plain buttons and lists, which a keyboard
reaches.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from commands.render.flags import with_flags
from commands.render.html.chart import Chart
from commands.render.html.cost_charts import cost_chart, roofline_chart, trade_off_chart
from commands.render.html.pictures import model_picture, network_picture
from commands.render.html.timeline_charts import memory_chart, timeline_chart
from commands.render.plans.parts import memory_warning
from commands.render.plans.words import compact, degrees_spelled, labelled, loses, plan_sentence
from planner.units import format_bytes, format_seconds
from search.report.overview import Overview
from search.report.report_numbers import ReportNumbers

if TYPE_CHECKING:
    from jinja2 import Environment


def render_report(numbers: ReportNumbers) -> str:
    """Return the report of a plan as the text of an HTML file."""
    from plotly.offline import get_plotlyjs

    charts = {chart.name: chart for chart in _charts(numbers)}
    return fill_template(
        "page.html.j2",
        **words_of(numbers),
        charts=charts,
        figures=_as_script({name: chart.figure for name, chart in charts.items()}),
        choices=_as_script({c.name: c.choice.traces for c in charts.values() if c.choice}),
        memory_warning=_memory_warning(numbers.overview),
        networks=[network_picture(network) for network in numbers.networks],
        source=_source(numbers),
        plan_file=numbers.plan.model_dump_json(indent=1, exclude={"layouts", "table", "estimate"}),
        style=text_of("page.css"),
        charts_script=text_of("charts.js"),
        script=text_of("page.js"),
        plotly=get_plotlyjs(),
    )


def text_of(name: str) -> str:
    """Return a file that stands beside this one."""
    return files(__package__).joinpath(name).read_text()


def fill_template(name: str, *folders: str, **values: Any) -> str:
    """Return a template filled; templates lie beside this file and in packages `folders`."""
    return _templates(folders).get_template(name).render(**values)


@cache
def _templates(folders: tuple[str, ...]) -> Environment:
    """Templates beside this file and in some packages; each is compiled once."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def read(wanted: str) -> str | None:
        places = (files(package).joinpath(wanted) for package in (__package__, *folders))
        return next((place.read_text() for place in places if place.is_file()), None)

    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(read),
    )  # fmt: skip


def words_of(numbers: ReportNumbers) -> dict[str, Any]:
    """Return what a page tells of a plan beside its charts, by the names of its templates."""
    plan, overview = numbers.plan, numbers.overview
    return {
        "title": f"{overview.model} on {overview.num_devices} devices",
        "sentence": plan_sentence(plan, overview),
        "tiles": _tiles(numbers),
        "parts": _parts(numbers),
        "model": model_picture(numbers),
        "considered": _considered(numbers),
        "runners_up": [
            {
                "label": runner["label"],
                "step": format_seconds(runner["step_s"]),
                "memory": format_bytes(runner["peak_bytes"]),
                "reason": f"{runner['step_s'] / overview.step_s - 1:+.1%}: "
                f"{loses(runner['differences'])}",
            }
            for runner in numbers.runners_up
        ],
        "proof": numbers.certificate.get("proved_by", {}),
    }


def _as_script(data: Any) -> str:
    """Return data as JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _charts(numbers: ReportNumbers) -> list[Chart]:
    overview = numbers.overview
    return [
        timeline_chart(numbers.predicted, numbers.measured),
        memory_chart(numbers.memory, overview.limit_bytes),
        trade_off_chart(overview, degrees_spelled(numbers.plan), numbers.runners_up, numbers.front),
        cost_chart(overview.path),
        roofline_chart(
            numbers.roofline,
            memory_bytes_per_s=numbers.memory_bytes_per_s,
            peaks=numbers.peak_flop_per_s,
        ),
    ]


def _tiles(numbers: ReportNumbers) -> list[tuple[str, str, str]]:
    """Return (name, figure, what to know of it) of the figures at the top."""
    overview, interval = numbers.overview, numbers.overview.interval
    fullest = overview.fullest
    held, limit = overview.memory[fullest]["total_bytes"], overview.limit_bytes[fullest]
    range_bytes = overview.memory_intervals[fullest]
    rate = (
        ("tokens per second", compact(overview.tokens_per_s))
        if overview.tokens_per_s
        else ("samples per second", compact(overview.samples_per_s))
    )
    tiles = [
        (
            "one step",
            format_seconds(overview.step_s),
            f"{format_seconds(interval.low_s)} to {format_seconds(interval.high_s)} in 4 of 5 "
            "cases",
        ),
        (*rate, f"a step trains {numbers.plan.global_batch:,} samples"),
        (
            "MFU",
            "not known" if overview.mfu is None else f"{overview.mfu:.1%}",
            f"of the {overview.dtype} peak of all devices",
        ),
        (
            "fullest device",
            format_bytes(held),
            f"{held / limit:.1%} of {format_bytes(limit)}; "
            f"{format_bytes(range_bytes.low_bytes)} to {format_bytes(range_bytes.high_bytes)} in "
            "4 of 5 cases",
        ),
    ]
    if (measured := numbers.plan.estimate.get("measured")) is not None:
        tiles.append(("measured", format_seconds(measured["step_s"]), "a step, when it was run"))
    return tiles


def _memory_warning(overview: Overview) -> str:
    fullest = overview.fullest
    held, has = overview.memory[fullest]["total_bytes"], overview.device_bytes[fullest]
    high = overview.memory_intervals[fullest].high_bytes
    return with_flags(memory_warning(held, high, has))


def _parts(numbers: ReportNumbers) -> list[dict[str, Any]]:
    path = numbers.overview.path
    return [
        {
            "label": label + (f" (pp rank {path.bottleneck})" if label == "imbalance" else ""),
            "meaning": meaning,
            "time": format_seconds(seconds),
            "share": seconds / path.step_s,
        }
        for label, meaning, seconds in labelled(path.parts)
    ]


def _considered(numbers: ReportNumbers) -> dict[str, Any]:
    proof = numbers.certificate
    if not proof:
        return {"summary": "No search found this plan, so nothing is proved of it.", "rows": []}
    rows = [("priced in full", proof["evaluated"])]
    rows += [(rule, count) for rule, count in proof["pruned"].items() if count]
    if proof["unexplored"]:
        rows.append(("not looked at: stopped early", proof["unexplored"]))
    total = max(1, proof["considered"])
    verdict = (
        "No configuration is faster under the cost model"
        if proof["gap"] == 0
        else f"No configuration is more than {proof['gap']:.2%} faster under the cost model"
    )
    stopped = f"; it stopped early: {proof['stopped_early']}" if proof["stopped_early"] else ""
    return {
        "summary": f"{verdict}. The search considered {proof['considered']:,} configurations and "
        f"priced {proof['evaluated']:,}{stopped}.",
        "rows": [
            {"rule": rule, "count": f"{count:,}", "share": count / total} for rule, count in rows
        ],
    }


def _source(numbers: ReportNumbers) -> str:
    overview, plan = numbers.overview, numbers.plan
    on = (
        "a shipped description of the devices, not on measurements of yours"
        if overview.source == "shipped"
        else "measurements of the devices"
    )
    return f"Prices stand on {on} ({plan.cluster.name}); the interval on {overview.interval.basis}."
