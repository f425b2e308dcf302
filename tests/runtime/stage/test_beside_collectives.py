"""Weight gradients are made while collectives of input gradients are under way (N11, D18)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.process import collectives
from planner.runtime.stage.weight_grads import Pending
from planner.timeline import BESIDE, COLLECTIVE, bubbles, load_timeline
from tests.runtime.scenarios import build, capture, check_plans
from tests.spawn import run_ranks


def beside(plan: Plan) -> Plan:
    """The plan with weight gradients beside collectives."""
    return plan.model_copy(update={"overlap": "input-gradients"})


def calls_of_a_backward(plan: Plan, folder: str) -> list[str]:
    """Train a step and return, in order, starts of collectives, weight products and waits."""
    told: list[str] = []
    run, accumulate = collectives.run, Pending.accumulate

    class Funcol:
        def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
            called = getattr(torch.ops._c10d_functional, name)

            def calling(*given: Any) -> torch.Tensor:
                told.append("wait" if name == "wait_tensor" else "start")
                return called(*given)

            return calling

    def product(self: Pending) -> None:
        told.append("product")
        accumulate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER_TIMELINE", folder)
        patch.setattr(collectives, "_funcol", Funcol())
        patch.setattr(Pending, "accumulate", product)
        tiny, module = build("small-gpt")
        engine = planner.apply(plan, module)
        engine.step(tiny.batch(plan.global_batch))
        engine.close()
    assert run is collectives.run
    return told


def test_products_are_made_between_the_start_of_a_collective_and_the_wait_for_it(tmp_path):
    """One block's backward of a GPT's layer on tp: the MLP's two products beside the sum of its
    input's gradient, the attention's beside the next; and so the timeline tells it.
    """
    plan = beside(default_plan(capture("small-gpt"), tp=2, num_microbatches=1))
    told, _ = run_ranks(calls_of_a_backward, 2, plan, str(tmp_path))
    # A group is what happens from the start of a collective to the wait for it.
    groups = " ".join(told).split("start")[1:]
    assert all(group.split()[-1] == "wait" for group in groups)
    made = [group.count("product") for group in groups]
    assert sum(made) == told.count("product") >= 8
    assert sum(count > 1 for count in made) == 4  # of two layers, each with two sums
    for line in load_timeline(tmp_path):
        found = [span for span in line.spans if span.kind == BESIDE]
        sums = [span for span in line.spans if span.kind == COLLECTIVE]
        assert len(found) >= 4
        for span in found:
            assert sum(s.start_s <= span.start_s and span.end_s <= s.end_s for s in sums) == 1
    idle = bubbles(load_timeline(tmp_path))
    assert all(0 < rank.collective_s < rank.step_s and rank.compute_s > 0 for rank in idle)


def test_without_the_choice_a_collective_is_waited_for_at_once(tmp_path):
    plan = default_plan(capture("small-gpt"), tp=2, num_microbatches=1)
    told, _ = run_ranks(calls_of_a_backward, 2, plan, str(tmp_path))
    assert "product" not in told
    assert told == ["start", "wait"] * (len(told) // 2)


def test_trains_as_one_process_on_two_ranks():
    """With tp alone, recomputed, and where the model ties weights; and parts of sequences."""
    cases = [
        ("small-gpt", {"tp": 2, "num_microbatches": 2}),
        ("small-gpt", {"tp": 2, "recompute": "full"}),
        ("small-gpt", {"tp": 2, "recompute": "selective"}),
        ("small-tied-gpt", {"tp": 2, "num_microbatches": 2}),
        ("small-gpt", {"cp": 2}),
    ]
    check_plans(
        2,
        [
            (name, beside(default_plan(capture(name, torch.float64), **choices)))
            for name, choices in cases
        ],
    )


def test_compiled_blocks_are_refused():
    plan = default_plan(capture("small-gpt"), tp=2)
    with pytest.raises(ValueError, match="use eager kernels, or no overlap"):
        Plan.model_validate(
            plan.model_dump(mode="json") | {"overlap": "input-gradients", "kernels": "compiled"}
        )


def test_plans_without_the_field_are_read_and_written_as_before():
    plan = default_plan(capture("small-gpt"), tp=2)
    assert "overlap" not in plan.model_dump(mode="json")
    again = Plan.model_validate(beside(plan).model_dump(mode="json"))
    assert again.overlap == "input-gradients"
