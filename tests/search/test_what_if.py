"""X3: what-if equals a fresh search of the changed question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import LayoutError, ModelError
from planner.language.graph import ModelGraph
from planner.units import DAY_S
from profiles import load_profile
from profiles.link_rates import with_link_rate
from search import SearchRequest, find_plan
from search.report.what_if import Answer, Case, Explorer, priced
from tests.captures import capture_tiny

H100, A100 = load_profile("h100-sxm5-80gb"), load_profile("a100-sxm4-80gb")

BASE = Case(
    num_devices=8,
    profile=None,
    memory_limit_bytes=None,
    link_rate=1.0,
    global_batch=32,
    length=None,
    precision="model",
    execution="ours-eager",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def graph_of(precision: str, length: int | None, arguments: Mapping[str, Any]) -> ModelGraph:
    if arguments:
        raise ModelError(f"model() takes no {next(iter(arguments))}")
    return capture_tiny("gpt")


EXPLORER = Explorer(
    model=Path("model.py"),
    graph_of=graph_of,
    profile_of=lambda name: H100 if name is None else A100,
)


@pytest.mark.parametrize(
    "choice",
    [
        {"num_devices": 4, "link_rate": 0.5},
        {"profile": "a100"},
        {"memory_limit_bytes": 4 * 2**30},
        pytest.param({"num_devices": 16, "link_rate": 0.01}, marks=pytest.mark.slow),
        {"global_batch": 64},
        {"execution": "ours-compiled"},
    ],
    ids=str,
)
def test_an_answer_is_that_of_a_fresh_search(choice):
    explorer = replace(EXPLORER, graph_of=lambda *_: capture_tiny("mlp"))
    found = explorer.answer(replace(BASE, **choice))
    fields = {"num_devices": 8, "global_batch": 32, **choice}
    profile = A100 if fields.pop("profile", None) else H100
    profile = with_link_rate(profile, fields.pop("link_rate", 1.0))
    fresh = find_plan(capture_tiny("mlp"), profile, SearchRequest(**fields, model_file="model.py"))
    assert found.plan == fresh.plan
    assert found.step_s == fresh.plan.estimate["step_s"]
    assert found.peak_bytes == fresh.plan.estimate["peak_bytes"]
    assert found.gap == fresh.certificate.gap


def test_all_combinations_are_cases():
    cases = BASE.varied(num_devices=(8, 16), global_batch=(), profile=("a100", "b200"))
    assert [(c.num_devices, c.profile) for c in cases] == [
        (8, "a100"), (8, "b200"), (16, "a100"), (16, "b200"),
    ]  # fmt: skip
    assert BASE.varied() == [BASE]
    assert cases[3].differences(BASE) == {"num_devices": 16, "profile": "b200"}
    assert BASE.differences(BASE) == {}


def test_one_case_that_cannot_be_does_not_end_the_others():
    cases = [replace(BASE, arguments=(("depth", 3),)), replace(BASE, num_devices=7), BASE]
    told: list[str] = []
    found = list(EXPLORER.answers(cases, lambda fraction, doing: told.append(doing)))
    assert found[0].reason == "model() takes no depth"
    assert "7 devices with a global batch of 32 cannot be used" in found[1].reason
    assert [answer.plan is None for answer in found] == [True, True, False]
    assert (found[0].days(1e9), found[0].samples_per_s) == (float("inf"), 0.0)
    assert told[-1].startswith("case 3 of 3: ")


def test_days_and_cost_by_hand():
    """32 samples of 16 tokens in 0.5 s: 1,024 tokens/s; 1e9 tokens in 11.3 days of 8 devices."""
    graph = capture_tiny("gpt")
    plan = EXPLORER.answer(BASE).plan
    told = {**plan.estimate, "step_s": 0.5}
    answer = priced(BASE, plan.model_copy(update={"estimate": told}), graph, H100)
    assert answer.memory is not None
    assert answer.memory.low_bytes < answer.peak_bytes < answer.memory.high_bytes
    assert not answer.may_not_fit
    assert replace(answer, limit_bytes=answer.peak_bytes).may_not_fit
    assert answer.tokens_per_s == 1024
    assert answer.samples_per_s == 64
    assert answer.days(1e9) == pytest.approx(1e9 / 1024 / 86_400)
    assert answer.cost(2.5, 1e9) == pytest.approx(2.5 * 8 * 1e9 / 1024 / 3600)


class Halving(Explorer):
    """Devices that share the work perfectly: 1,000 tokens a second each, up to 64 of them."""

    def answer(self, case: Case, progress: Any = None) -> Answer:
        fits = case.num_devices <= 64
        return Answer(
            case=case,
            plan=PLAN if fits else None,
            reason="" if fits else "too many",
            step_s=1.0 / case.num_devices if fits else float("inf"),
            peak_bytes=0.0,
            tokens_per_s=1000.0 * case.num_devices if fits else 0.0,
        )


PLAN: Any = object()


@pytest.mark.parametrize("needed", [1, 8, 9, 17, 33, 40, 41, 56])
def test_a_deadline_names_the_fewest_devices(needed):
    """Beside trying every multiple of a node's eight devices."""
    explorer = Halving(model=Path("m"), graph_of=graph_of, profile_of=lambda name: H100)
    tokens, deadline_s = 1e9, 1e9 / (1000.0 * needed) * 1.0001
    tried = explorer.fewest_devices(BASE, tokens=tokens, deadline_s=deadline_s)
    counts = [answer.case.num_devices for answer in tried]
    assert counts == sorted(set(counts))
    in_time = [a.case.num_devices for a in tried if a.days(tokens) * DAY_S <= deadline_s]
    assert in_time[0] == next(n for n in range(8, 65, 8) if n >= needed)


def test_a_deadline_out_of_reach_ends_with_what_was_tried():
    explorer = Halving(model=Path("m"), graph_of=graph_of, profile_of=lambda name: H100)
    tried = explorer.fewest_devices(BASE, tokens=1e9, deadline_s=1.0)
    assert [answer.case.num_devices for answer in tried] == [8, 16, 32, 64, 128]


def test_a_deadline_needs_tokens_and_a_plan():
    mlp = replace(EXPLORER, graph_of=lambda *_: capture_tiny("mlp"))
    with pytest.raises(LayoutError, match="no tokens"):
        mlp.fewest_devices(BASE, tokens=1e9, deadline_s=1.0)
    full = Full(model=Path("m"), graph_of=graph_of, profile_of=lambda name: H100)
    with pytest.raises(LayoutError, match="no number of devices tried fits: too large"):
        full.fewest_devices(BASE, tokens=1e9, deadline_s=1.0)


class Full(Explorer):
    """Nothing fits."""

    def answer(self, case: Case, progress: Any = None) -> Answer:
        return Answer(
            case=case,
            plan=None,
            reason="too large",
            step_s=float("inf"),
            peak_bytes=0.0,
            tokens_per_s=0.0,
        )
