"""`planner search` on one screen: what it says, how wide it is, and the same as data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from commands.render.plans.answer import Answer, _joined, as_data
from commands.render.plans.pipeline import draw_step
from commands.render.plans.words import labelled, loses, plan_sentence
from costmodel import CostCache, estimate
from costmodel.compare import as_rank_timelines
from costmodel.uncertainty import Interval
from planner.timeline import RankTimeline, Span
from profiles import load_profile
from search import Certificate, RunnerUp, SearchResult
from search.report.overview import find_overview
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import make_plan

SEARCH = ("--profile", "h100-sxm5-80gb", "--gpus", 4, "--global-batch", 16)


@pytest.fixture(scope="module")
def answer() -> Answer:
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    profile = load_profile("h100-sxm5-80gb")
    plan, costs = make_plan(graph, pp=3, dp=2, m=8, recompute="full"), CostCache(graph, profile)
    found = estimate(graph, profile, plan, costs=costs)
    step_s = found.step_s
    plan = plan.model_copy(update={"estimate": found.to_dict()})
    interval = Interval(low_s=0.9 * step_s, high_s=1.1 * step_s, basis="published runs")
    runners = [
        RunnerUp(
            label=f"dp{slower}", step_s=slower * step_s, peak_bytes=2.0**30, reason="slower",
            differences=(("tp_comm_s", 2e-3), ("optimizer_s", -1e-3)),
        )
        for slower in (1.05, 1.5, 2.0)
    ]  # fmt: skip
    proof = Certificate(
        best_s=step_s, lower_bound_s=step_s, considered=30, evaluated=3, unexplored=0,
        pruned=(("bound: cannot beat the best", 20), ("memory: the whole plan, rank by rank", 7)),
        proved_by=(),
    )  # fmt: skip
    return Answer(
        result=SearchResult(plan=plan, certificate=proof, runners_up=tuple(runners), search_s=1.5),
        plan=plan,
        overview=find_overview(plan, costs, found, interval),
        predicted=as_rank_timelines(found.timeline),
        model_file=Path("model.py"),
        out=Path("plan.json"),
    )


def printed(answer: Answer, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(answer)
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_one_screen(answer, width):
    text = printed(answer, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 60
    assert "…" not in text  # nothing is cut off
    told = " ".join(text.split())
    overview = answer.overview
    assert "Best plan: gpt on 6 NVIDIA H100 80GB HBM3: dp 2 x pp 3, schedule 1f1b" in told
    assert "recomputation full" in told
    assert "±10%" in told
    assert "MFU" in told
    assert "fill and drain" in told
    assert (
        f"Bottleneck: pp rank {overview.path.bottleneck} (stage {overview.path.bottleneck}," in told
    )
    assert "of 30 configurations 20 can't be faster, 7 do not fit, 3 priced in full" in told
    assert "Second: dp1.05, +5.0% (too close to call), 1.00 GiB: loses 2 ms in tensor" in told
    assert "Third: dp1.5, +50.0%, 1.00 GiB" in told
    assert "dp2.0" not in told
    assert "1 runner-up is within what the estimate may be off by" in told
    assert "--measure 2 lets a few steps decide" in told
    assert "planner verify plan.json model.py" in told


def test_warnings_that_matter(answer):
    float32, shipped = answer.warnings[0], answer.warnings[-2]
    assert "67 of the 989 TFLOP/s that this device has in bfloat16; `precision` bf16" in float32
    assert "shipped description (h100-sxm5-80gb)" in shipped
    full = replace(answer.overview, device_bytes=(1.0,) * 3, dtype="bfloat16", source="measured")
    warnings = replace(answer, overview=full).warnings
    assert "memory is tight" in warnings[0]
    assert not any("float32" in line or "shipped" in line for line in warnings)


def test_data_has_all_of_it(answer):
    data = json.loads(json.dumps(as_data(answer)))
    assert len(data["runners_up"]) == 3
    assert data["certificate"]["pruned"]["bound: cannot beat the best"] == 20
    assert sum(data["path"]["parts"].values()) == pytest.approx(data["step_s"])
    assert [stage["pp_rank"] for stage in data["stages"]] == [0, 1, 2]
    assert data["mfu"] == answer.overview.mfu
    assert data["next"][1] == "planner verify plan.json model.py"
    assert any("--precision bf16" in line for line in data["warnings"])


def test_the_command_prints_json_alone(planner, write_model):
    path = write_model()
    done = planner("search", path, *SEARCH, "--json")
    assert done.code == 0, done.stderr
    data = json.loads(done.stdout)
    assert "wrote plan.json" in done.stderr
    told = json.loads(Path("plan.json").read_text())["estimate"]
    assert told["time"] == data["path"]["parts"]
    assert [r["label"] for r in told["runners_up"]] == [r["label"] for r in data["runners_up"]]
    plain = planner("search", path, *SEARCH).stdout
    assert "\x1b" not in plain
    assert "kept from an earlier search" in " ".join(plain.split())


def line(rank: int, *spans: tuple[str, float, float, int]) -> RankTimeline:
    made = (
        Span(kind=kind, name=kind, step=0, start_s=a, end_s=b, stage=rank, microbatch=m)
        for kind, a, b, m in spans
    )
    return RankTimeline(rank=rank, pp_rank=rank, clock_offset_s=0.0, spans=tuple(made))


def test_a_step_in_characters():
    """Two ranks of one microbatch in 20 columns of a step of 10 s: two columns a second."""
    lines = [
        line(0, ("F", 0, 2, 0), ("B", 6, 9, 0), ("O", 9, 10, -1)),
        line(1, ("F", 2, 4, 0), ("B", 4, 6, 0)),
    ]
    assert draw_step(lines, 10.0, width=30).plain.splitlines() == [
        "rank 0 |FFFF········BBBBBBOO|",
        "rank 1 |····FFFFBBBB········|",
        "        F forward  B backward  O optimizer  · waits",
    ]


def test_many_microbatches_are_shaded_and_many_ranks_counted():
    jobs = [("F", m / 10, m / 10 + 0.1, m) for m in range(50)]
    text = draw_step([line(rank, *jobs) for rank in range(20)], 10.0, width=60).plain
    assert re.search(r" rank 0 \|█{24}▒·{24}\|", text)
    assert "4 more" in text
    assert "rank 19" in text
    assert "█ works" in text


def test_words(answer):
    assert plan_sentence(answer.plan, answer.overview).endswith("recomputation full.")
    assert loses([("tp_comm_s", 0.2), ("compute_s", -0.1)]) == (
        "loses 200 ms in tensor parallel messages, gains 100 ms in compute"
    )
    assert loses([]) == "the same time"
    assert [label for label, _, _ in labelled({"compute_s": 1.0, "host_s": 0.0})] == ["compute"]


def test_stages_of_a_rank_share_a_line_and_a_name():
    assert _joined(["embed, layers.0..1", "layers.8..9", "layers.31, norm"]) == (
        "embed, layers.0..1; 8..9; 31, norm"
    )
    assert _joined(["embed", "layers.0"]) == "embed; layers.0"
    assert _joined(["encoder.3", "decoder.1..2"]) == "encoder.3; decoder.1..2"
