"""A plan's own table: made for its stages, kept only if the cost model finds it faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from costmodel import CostCache, estimate
from planner.language.graph import ModelGraph
from planner.language.plan import Plan, load_plan, save_plan
from planner.language.plan.schedule_of import schedule_of
from search import SearchRequest, find_plan
from search.synthesis import with_synthesised_table
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4, flop_per_s=1e12, bytes_per_s=1e10)


@pytest.fixture(scope="module")
def gpt() -> ModelGraph:
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), loss=model.loss, name="g")


def planned(gpt: ModelGraph, **choices: object) -> Plan:
    request = SearchRequest(num_devices=2, global_batch=6, pp=2, microbatch_size=1, **choices)
    plan = find_plan(gpt, MACHINE, request).plan
    assert plan is not None
    return plan


def test_a_faster_table_replaces_the_named_one(gpt: ModelGraph, tmp_path: Path) -> None:
    """P14, P17: 1F1B over two uneven stages leaves a bubble that split backwards fill."""
    plan, costs = planned(gpt, schedule="1f1b"), CostCache(gpt, MACHINE)
    answer = estimate(gpt, MACHINE, plan, costs=costs)
    limit = MACHINE.memory_bytes
    better = with_synthesised_table(plan, answer, costs=costs, memory_limit_bytes=limit)
    assert better is not None
    own, new_answer = better
    assert new_answer.step_s < 0.99 * answer.step_s
    assert new_answer.peak_bytes <= limit
    assert own.estimate["step_s"] == new_answer.step_s
    assert (own.schedule, own.stages) == ("synthesised", plan.stages)
    save_plan(own, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert schedule_of(loaded) == new_answer.timeline.schedule


def test_memory_is_respected(gpt: ModelGraph) -> None:
    """With no more than 1F1B's own memory the table is still valid and fits."""
    plan, costs = planned(gpt, schedule="1f1b"), CostCache(gpt, MACHINE)
    answer = estimate(gpt, MACHINE, plan, costs=costs)
    better = with_synthesised_table(plan, answer, costs=costs, memory_limit_bytes=answer.peak_bytes)
    assert better is None or better[1].peak_bytes <= answer.peak_bytes


def test_one_rank_keeps_its_table(gpt: ModelGraph) -> None:
    plan = find_plan(gpt, MACHINE, SearchRequest(num_devices=1, global_batch=4)).plan
    assert plan is not None
    costs = CostCache(gpt, MACHINE)
    answer = estimate(gpt, MACHINE, plan, costs=costs)
    assert with_synthesised_table(plan, answer, costs=costs, memory_limit_bytes=1e12) is None


def test_asked_for_by_name(gpt: ModelGraph) -> None:
    """P14, P17: `synthesised` is no slower than the best named schedule; the bound stays below."""
    machine = Machine(context_bytes=0.0, flop_per_s=1e12, bytes_per_s=1e10, alpha_s=1e-3)
    request = SearchRequest(num_devices=2, global_batch=6, pp=2, microbatch_size=1)
    named = find_plan(gpt, machine, request)
    own = find_plan(gpt, machine, replace(request, schedule="synthesised"))
    assert named.plan is not None
    assert own.plan is not None
    assert own.certificate is not None
    assert own.plan.schedule == "synthesised"
    assert own.plan.estimate["step_s"] == own.certificate.best_s
    assert own.certificate.best_s < named.plan.estimate["step_s"]
    assert own.certificate.lower_bound_s <= own.certificate.best_s
    schedule_of(own.plan)
