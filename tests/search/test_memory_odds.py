"""B6: A plan fits with the odds that it was asked for; a faster one that may not fit is told
beside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.uncertainty import plan_odds_of_fit
from planner.errors import LayoutError
from planner.language.templates import Transformer, build_transformer
from profiles import load_profile
from search import SearchRequest, find_plan, find_plan_once
from search.candidates import Candidates
from search.report.riskier import find_riskier

MODEL = Transformer(
    layers=20, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=32000, seq_len=4096
)
REQUEST = SearchRequest(
    num_devices=8, global_batch=32, precision="bf16", execution="torchtitan-compiled", pp=1, tp=1,
    dp=8, microbatch_size=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def graph():
    return build_transformer(MODEL)


@pytest.fixture(scope="module")
def h100():
    return load_profile("h100-sxm5-80gb")


def test_plans_fit_with_nine_of_ten_by_default(graph, h100):
    sure, even = (
        find_plan(graph, h100, replace(REQUEST, memory_odds=odds)).plan for odds in (None, 0.5)
    )
    assert plan_odds_of_fit(sure, h100) >= 0.9
    assert 0.5 <= plan_odds_of_fit(even, h100) < 0.9
    assert even.estimate["step_s"] < sure.estimate["step_s"]


def test_the_faster_plan_is_found_beside_the_sure_one(graph, h100, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    even = find_plan(graph, h100, replace(REQUEST, memory_odds=0.5))
    for _ in range(2):  # searched, and kept
        found = find_plan_once(graph, h100, REQUEST, names_riskier=True)
        assert found.riskier.estimate["step_s"] == even.plan.estimate["step_s"]
    assert found.was_kept
    assert find_riskier(graph, h100, replace(REQUEST, memory_odds=0.5), even, Candidates.of) is None


def test_a_limit_is_the_estimate_s_unless_odds_are_asked_for(graph, h100):
    limit = 60 * 2**30
    given = replace(REQUEST, memory_limit_bytes=limit)
    assert given.limit_bytes(h100) == limit
    assert replace(given, memory_odds=0.9).limit_bytes(h100) < limit


@pytest.mark.parametrize("odds", [0.0, 0.49, 0.995, 1.0, float("nan")])
def test_odds_that_mean_nothing_are_refused(odds):
    with pytest.raises(LayoutError, match="`memory_odds`"):
        replace(REQUEST, memory_odds=odds)
