"""N1: ops across samples run on the whole batch by every replica: training equals one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.source.model_file import ModelSource
from planner.emit import EMITTERS, PlanView, refusals
from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from planner.runtime.step.intermediates import intermediate_names
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, train_beside
from tests.runtime.whole_batch_models import MODELS, batch
from tests.spawn import run_ranks

RTOL = 1e-9


def captured(name: str) -> ModelGraph:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        return capture_module(MODELS[name](), batch(2), batch(3), name=name)
    finally:
        torch.set_default_dtype(torch.float32)


def gap_to_one_process(name: str, plan: Plan, sizes: tuple[int, ...]) -> float:
    """Train and evaluate on batches of these sizes; return the largest difference."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module: nn.Module = MODELS[name]()
    alone = OneProcess(module, small_steps)
    engine = planner.apply(plan, module, optimizer=small_steps(module))
    batches = [batch(size, step) for step, size in enumerate(sizes)]
    gaps = train_beside(engine, alone, batches, evaluates=True, gap=gap_to_largest)
    engine.close()
    return gaps.largest


def small_steps(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)


def gaps(cases: list[tuple[str, Plan, tuple[int, ...]]]) -> dict[str, float]:
    return {
        f"{name} {plan.degrees} zero {plan.zero_stage}": gap_to_one_process(name, plan, s)
        for name, plan, s in cases
    }


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"dp": 2}, {"dp": 2, "zero_stage": 3}, {"dp": 2, "recompute": "full"}],
    4: [{"dp": 4, "zero_stage": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "schedule": "naive"}],
}


QUICK = {2: tuple(MODELS), 4: ("Clip", "Barlow", "Routed")}
"""Models of the quick tests: on two ranks all, each in one of the layouts."""


def check(world_size: int, layouts: dict[str, list[dict[str, Any]]]) -> None:
    """Train models under layouts, all by one group of ranks."""
    cases = []
    for name, of_model in layouts.items():
        graph = captured(name)
        for layout in of_model:
            size = 8 // layout["dp"]
            plan = default_plan(graph, microbatch_size=size, num_microbatches=1, **layout)
            # (On tp, a batch of other sizes may not divide.)
            cases.append((name, plan, (8, 8) if "tp" in layout else (8, 7, 5)))
    for found in run_ranks(gaps, world_size, cases):
        assert {case: gap for case, gap in found.items() if not gap < RTOL} == {}


def test_each_model_equals_one_process_on_two_ranks():
    layouts = LAYOUTS[2]
    check(2, {name: [layouts[at % len(layouts)]] for at, name in enumerate(QUICK[2])})


def test_telling_models_equal_one_process_on_four_ranks():
    check(4, dict.fromkeys(QUICK[4], LAYOUTS[4]))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_all_models_under_all_layouts(name, world_size):
    check(world_size, {name: LAYOUTS[world_size]})


def test_microbatches_are_refused():
    plan = default_plan(captured("Clip"), num_microbatches=2)
    with pytest.raises(PlanError, match=r"samples are compared with each other .*`accept` local-"):
        planner.apply(plan, MODELS["Clip"]().double())


def fetched_and_own(plan: Plan) -> float:
    """Give each replica its own samples; return how far features, which all have, are off."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = MODELS["Clip"]()
    alone = copy.deepcopy(module)
    engine = planner.apply(plan, module)
    name = next(n for n in intermediate_names(engine.graph) if n.endswith("/matmul"))
    whole = batch(8)
    rows = slice(4 * engine.replica, 4 * engine.replica + 4)
    loss = engine.step(planner.OwnPart(tuple(t[rows] for t in whole)), fetch=[name])
    gap = abs(loss.item() - alone(*whole).item())
    if engine.fetched:
        assert engine.fetched[name].shape == (8, 8)
    engine.close()
    return gap


def test_own_parts_and_what_is_fetched_of_the_whole_batch():
    plan = default_plan(captured("Clip"), dp=2, microbatch_size=4, num_microbatches=1)
    assert max(run_ranks(fetched_and_own, 2, plan)) < RTOL


def verified(plan: Plan) -> VerifyReport | None:
    source = ModelSource(
        path=Path("VicReg"),
        build=MODELS["VicReg"],
        batch=float_batch,
        loss=None,
        dependencies=(),
    )
    return compare_with_one_process(plan, source, steps=2)


def float_batch(size: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.float() for tensor in batch(size))


def test_verify_compares_with_one_process_on_the_whole_batch():
    graph = capture_module(MODELS["VicReg"](), float_batch(2), float_batch(3), name="VicReg")
    plan = default_plan(graph, dp=2, microbatch_size=4, num_microbatches=1)
    report = run_ranks(verified, 2, plan)[0]
    assert report.passed
    assert not any("microbatch by microbatch" in note for note in report.notes)


def test_summed_losses_of_replicas_are_refused():
    plan = default_plan(captured("Clip"), dp=2, microbatch_size=4, num_microbatches=1)
    for told in run_ranks(summed, 2, plan):
        assert told.startswith('loss_weight="sum" was given, and the loss is a mean over samples')


def summed(plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        planner.apply(plan, MODELS["Clip"]().double(), loss_weight="sum")
    return str(caught.value)


def test_systems_that_compute_on_each_replicas_own_samples_are_refused():
    graph = captured("Clip")
    plan = default_plan(graph, dp=2, microbatch_size=4, num_microbatches=1)
    told = [r.feature for r in refusals(PlanView(plan=plan, graph=graph), EMITTERS["deepspeed"])]
    assert "whole-batch" in told
    assert not refusals(PlanView(plan=plan, graph=graph), EMITTERS["torchrun"])
