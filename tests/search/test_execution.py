"""Searches for other runtimes: their bounds, their best plans, and the prices these are found with.

A runtime fuses kernels, hides collectives and keeps other bytes than ours; what a search knows of
it is what the cost model prices, never a sum of ops.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from costmodel import estimate
from costmodel.execution import execution_names, find_execution
from planner.errors import PlannerError
from planner.language.graph import ModelGraph
from planner.language.plan import OURS, load_plan, save_plan
from planner.language.templates import Transformer, build_transformer
from profiles import Profile, load_profile
from search import SearchRequest, find_plan
from search.bounds.catalogue import MEMORY_BOUNDS, STEP_BOUNDS
from search.result_cache import question_digest
from tests.referees.plans import (
    best_within,
    check_against,
    every_answer,
    num_answers,
    seconds_and_bytes,
)
from tests.search.test_bounds import random_samples

SMALL = Transformer(
    layers=6, hidden=512, heads=8, kv_heads=2, ffn_hidden=1536, vocab=1024, seq_len=512
)
TWO_NODES = SearchRequest(num_devices=16, global_batch=32, offload="none", precision="bf16")
QUICK = ("megatron-core", "nanotron")
OTHERS = [
    name
    for name in execution_names()
    if name not in QUICK and find_execution(name).prices == "rates"
]


@cache
def h100() -> Profile:
    return load_profile("h100-sxm5-80gb")


@cache
def graph_of(**sizes) -> ModelGraph:
    return build_transformer(replace(SMALL, **sizes))


@pytest.mark.parametrize(
    ("execution", "tied", "most"),
    [
        *((name, False, 18) for name in QUICK),
        *(pytest.param(name, False, 60, marks=pytest.mark.slow) for name in OTHERS),
        *(pytest.param(name, True, 60, marks=pytest.mark.slow) for name in (*QUICK, *OTHERS)),
    ],
)
def test_bounds_hold_for_every_runtime(execution, tied, most):
    """Of random plans no bound is above the estimate, what the search simulates equals it, and the
    highest bound comes near to some."""
    request = replace(TWO_NODES, execution=execution)
    nearest = 0.0
    for sample in random_samples(graph_of(tied=tied), h100(), request, most):
        of_step = max(
            bound.formula(sample.costs, sample.config)
            for bound in STEP_BOUNDS
            if sample.config.vpp == 1 or not bound.reads_schedule
        )
        of_bytes = max(bound.formula(sample.costs, sample.config) for bound in MEMORY_BOUNDS)
        assert of_step <= sample.step_s * (1 + 1e-9)
        assert of_bytes <= sample.peak_bytes * (1 + 1e-9)
        assert sample.quick_s == pytest.approx(sample.step_s, rel=1e-9)
        nearest = max(nearest, of_step / sample.step_s)
    assert nearest > 0.7


@pytest.mark.parametrize(
    ("execution", "instances"),
    [
        ("torchtitan", 1),
        *(
            pytest.param(name, 4, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for name in (*QUICK, "torchtitan", "ours-compiled")
        ),
    ],
)
def test_the_best_for_a_runtime_equals_trying_everything(execution, instances):
    """X1: as for ours, no plan that fits beats the answer by more than its gap."""
    rng = np.random.default_rng(3)
    for _ in range(instances):
        layers, devices = int(rng.integers(2, 5)), int(rng.choice([2, 4, 8]))
        graph = graph_of(layers=layers, tied=bool(rng.integers(2)))
        kinds = rng.choice(["none", "selective", "full"], size=2, replace=False)
        schedules = "1f1b", str(rng.choice(["zb_h1", "interleaved_1f1b", "fthenb", "zb_v"]))
        allow = [("recompute", str(kind)) for kind in kinds]
        allow += [("schedule", name) for name in schedules]
        allow += [("zero", str(zero)) for zero in {0, int(rng.choice([1, 3]))}]
        for most_pp in (4, 2):
            request = SearchRequest(
                num_devices=devices, global_batch=8, offload="none", execution=execution,
                precision="bf16",
                allow=(*allow, *(("pp", str(pp)) for pp in range(1, most_pp + 1))),
            )  # fmt: skip
            if num_answers(graph, h100(), request) <= 400:
                break
        every = seconds_and_bytes(every_answer(graph, h100(), request))
        limit = int(min(every)[1] * rng.choice([0.8, 0.95, 1.0, 2.0]))
        result = find_plan(graph, h100(), replace(request, memory_limit_bytes=limit))
        gap = check_against(best_within(limit, every), limit, result)
        assert gap is None or gap < 0.02


def test_a_plan_is_priced_for_the_runtime_it_was_found_for(tmp_path):
    """Its file says which, and that is what `estimate` takes; another runtime, another price."""
    graph = graph_of()
    request = replace(TWO_NODES, num_devices=8, execution="megatron-core")
    found = find_plan(graph, h100(), request).plan
    assert found is not None
    save_plan(found, tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.execution == "megatron-core"
    assert estimate(graph, h100(), plan).step_s == pytest.approx(found.estimate["step_s"], rel=1e-9)
    ours = estimate(graph, h100(), plan, execution=find_execution(OURS)).step_s
    assert abs(ours / found.estimate["step_s"] - 1) > 0.01


def test_a_plan_of_an_older_file_is_ours():
    plan = find_plan(graph_of(), h100(), SearchRequest(num_devices=2, global_batch=4)).plan
    assert plan is not None
    old = plan.model_dump(mode="json")
    del old["execution"]
    assert type(plan).model_validate(old) == plan
    assert plan.execution == OURS


def test_runtimes_are_different_questions():
    asked = [replace(TWO_NODES, execution=name) for name in (OURS, "nanotron", "torchtitan")]
    assert len({question_digest(graph_of(), h100(), request) for request in asked}) == 3


def test_an_unknown_runtime_is_refused():
    with pytest.raises(PlannerError, match="'warm' is unknown"):
        replace(TWO_NODES, execution="warm")
