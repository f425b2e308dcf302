"""Parameters and buffers of no elements in every layout: trained, gathered, saved as others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.builders import gpt_batch
from tests.captures import capture_module
from tests.empty import EmptyGPT
from tests.runtime.checkpoint.scenarios import Case, load_and_train, train_and_save
from tests.runtime.scenarios import capture, check_plans
from tests.spawn import run_ranks

RTOL = 1e-10
NAME = "empty-gpt"

TWO: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp2-zero1": {"dp": 2, "zero_stage": 1, "num_microbatches": 2},
    "dp2-zero2": {"dp": 2, "zero_stage": 2, "num_microbatches": 2},
    "dp2-zero3": {"dp": 2, "zero_stage": 3, "num_microbatches": 2},
    "dp2-zero3-full": {"dp": 2, "zero_stage": 3, "recompute": "full"},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 4},
}


def plan_of(name: str, **changes: Any):
    plan = default_plan(capture(NAME, torch.float64), **TWO[name])
    return plan.model_copy(update=changes)


def test_trains_as_one_process():
    plans = [plan_of(name) for name in TWO]
    plans += [plan_of(name, optimizer_on_host=True) for name in ("dp2", "dp2-zero3", "pp2")]
    check_plans(2, [(NAME, plan) for plan in plans])


def losses(every: list[Plan]) -> list[list[float]]:
    found = []
    for plan in every:
        torch.manual_seed(0)
        engine = planner.apply(plan, EmptyGPT())
        found.append([engine.step(gpt_batch(plan.global_batch)).item() for _ in range(2)])
    return found


def test_in_bf16_what_is_whole_under_zero_is_cast_as_without():
    graph = capture_module(EmptyGPT(), gpt_batch(2), gpt_batch(3), name=NAME, precision="bf16")
    every = [
        default_plan(graph, dp=2, zero_stage=zero).model_copy(update={"precision": "bf16"})
        for zero in (0, 1)
    ]
    without, sharded = run_ranks(losses, 2, every)[0]
    assert sharded == pytest.approx(without, rel=1e-6)


def test_a_checkpoint_goes_on_under_another_plan(tmp_path):
    pairs = [("dp2-zero1", "pp2"), ("pp2", "dp2-zero3"), ("dp2-zero3", "dp2")]
    cases = [
        Case(NAME, plan_of(saved), plan_of(loaded), str(tmp_path / saved))
        for saved, loaded in pairs
    ]
    before = run_ranks(train_and_save, 2, cases)[0]
    after = run_ranks(load_and_train, 2, cases)[0]
    for (saved, _), (loaded, _) in zip(before, after, strict=True):
        assert {n: t.shape for n, t in loaded.state.items()} == {
            n: t.shape for n, t in saved.state.items()
        }
        for name, value in saved.state.items():
            assert torch.equal(loaded.state[name], value), name
