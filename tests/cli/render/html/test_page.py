"""The report's words: figures at the top, what was considered, and data inside a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commands.render.html.page import _as_script, _memory_warning, fill_template, text_of, words_of
from costmodel.uncertainty import MemoryInterval
from planner.units import GIB
from tests.cli.render.html.test_pictures import numbers
from tests.cli.render.views import overview

PROOF: dict[str, Any] = {
    "evaluated": 3, "considered": 1030, "unexplored": 0, "gap": 0.0, "stopped_early": "",
    "pruned": {"memory: too full": 1000, "bound: slower": 27, "never": 0},
    "proved_by": {"a bound": 2},
}  # fmt: skip


def tiles(found):
    return {name: (figure, note) for name, figure, note in found["tiles"]}


def test_the_figures_at_the_top_have_their_units_and_ranges():
    found = tiles(words_of(numbers(overview=overview())))
    assert found["one step"] == ("10 s", "9 s to 12 s in 4 of 5 cases")
    assert found["tokens per second"][0] == "2.05 k"
    assert found["MFU"] == ("41.0%", "of the bfloat16 peak of all devices")
    # Rank 1 is nearer to its limit: 6 of 8 GiB.
    assert found["fullest device"] == (
        "6.00 GiB", "75.0% of 8.00 GiB; 5.00 GiB to 9.00 GiB in 4 of 5 cases"
    )  # fmt: skip
    assert "measured" not in found


def test_a_model_without_tokens_and_an_unknown_rate_say_so():
    shown = overview(tokens_per_s=0.0, mfu=None)
    plan = numbers().plan.model_copy(update={"estimate": {"measured": {"step_s": 0.5}}})
    found = tiles(words_of(numbers(overview=shown, plan=plan)))
    assert found["samples per second"][0] == "0.8"
    assert found["MFU"][0] == "not known"
    assert found["measured"][0] == "500 ms"


def test_parts_are_shares_of_the_step_and_imbalance_names_its_rank():
    parts = words_of(numbers())["parts"]
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    found = {part["label"]: (part["time"], part["share"]) for part in parts}
    assert found["compute"] == ("6 s", 0.6)
    assert "imbalance (pp rank 1)" in found
    assert "offload to the host" not in found  # takes no time


def test_what_a_search_considered_adds_up():
    found = words_of(numbers(certificate=PROOF))["considered"]
    assert found["summary"] == (
        "No configuration is faster under the cost model. The search considered 1,030 "
        "configurations and priced 3."
    )
    assert [(row["rule"], row["count"]) for row in found["rows"]] == [
        ("priced in full", "3"), ("memory: too full", "1,000"), ("bound: slower", "27")
    ]  # fmt: skip
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)


def test_a_search_that_stopped_early_claims_no_more_than_it_proved():
    early = PROOF | {"gap": 0.034, "unexplored": 5, "stopped_early": "time limit"}
    found = words_of(numbers(certificate=early))["considered"]
    assert "No configuration is more than 3.40% faster" in found["summary"]
    assert "it stopped early: time limit" in found["summary"]
    assert found["rows"][-1]["rule"] == "not looked at: stopped early"
    assert "nothing is proved" in words_of(numbers())["considered"]["summary"]


def test_runners_up_say_by_how_much_they_lost():
    runner = {
        "label": "dp 4", "step_s": 11.0, "peak_bytes": GIB, "differences": [("tp_comm_s", 1.5)]
    }  # fmt: skip
    (found,) = words_of(numbers(runners_up=(runner,)))["runners_up"]
    assert (found["step"], found["memory"]) == ("11 s", "1.00 GiB")
    assert found["reason"] == "+10.0%: loses 1.5 s in tensor parallel messages"


def test_a_warning_of_memory_is_of_the_fullest_rank_in_flags():
    """Rank 1 may need 9 GiB of 8; rank 0 is far from its 16."""
    assert "has 8.00 GiB and needs more than 9.00 GiB" in _memory_warning(overview())
    assert "--memory-limit" in _memory_warning(overview())
    sure = tuple(MemoryInterval(low_bytes=1, high_bytes=8 * GIB, basis="") for _ in range(2))
    assert _memory_warning(overview(memory_intervals=sure)) == ""


def test_data_inside_a_script_cannot_end_it():
    told = _as_script({"name": "</script><b>"})
    assert "<" not in told
    assert json.loads(told) == {"name": "</script><b>"}
    with pytest.raises(ValueError, match="Out of range float"):
        _as_script({"x": float("nan")})


def test_templates_escape_what_they_are_given_and_miss_nothing(tmp_path, monkeypatch):
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "__init__.py").write_text("")
    (tmp_path / "told" / "own.html.j2").write_text("<p>{{ title }}</p>")
    monkeypatch.syspath_prepend(tmp_path)
    assert fill_template("own.html.j2", "told", title="<a>") == "<p>&lt;a&gt;</p>"
    from jinja2 import TemplateNotFound, UndefinedError

    with pytest.raises(UndefinedError, match="title"):
        fill_template("own.html.j2", "told")
    with pytest.raises(TemplateNotFound):
        fill_template("own.html.j2")
    assert "{" in text_of("page.css")
