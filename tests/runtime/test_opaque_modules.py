"""Parts that run as they are train as in one process, under every kind of plan (fp64).

The reference is the user's module in a plain loop. Of the experts one is never chosen: its
parameters have no gradient there, and an optimizer with decay leaves them alone.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.source.model_file import ModelSource
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.proofs.by_block.prove import prove
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from planner.runtime.stage.calls import opaque_modules
from tests.captures import capture_module
from tests.opaque_models import PARTS, Chain, batch
from tests.runtime.beside import OneProcess
from tests.spawn import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
    "virtual stages": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "split backward": {"pp": 2, "schedule": "zb_h1"},
    "ZeRO 1": {"dp": 2, "zero_stage": 1},
    "ZeRO 2": {"dp": 2, "zero_stage": 2},
    "ZeRO 3": {"dp": 2, "zero_stage": 3},
    "full": {"dp": 2, "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
    "full on stages": {"pp": 2, "recompute": "full"},
}
QUICK = [("loop over experts", name) for name in LAYOUTS]
QUICK += [(what, ("dp", "tp")[number % 2]) for number, what in enumerate(list(PARTS)[1:])]
REST = [(what, name) for what in PARTS for name in LAYOUTS if (what, name) not in QUICK]


def build(what: str) -> nn.Module:
    torch.manual_seed(0)
    return Chain(PARTS[what])


def source_of(what: str) -> ModelSource:
    return ModelSource(
        path=Path("chain.py"),
        build=partial(build, what),
        batch=batch,
        loss=None,
        dependencies=(),
    )


def graph_of(what: str, **options: Any) -> ModelGraph:
    return capture_module(build(what), batch(2), batch(3), **options)


def compare(cases: list[tuple[str, Plan]]) -> list[VerifyReport | None]:
    return [compare_with_one_process(plan, source_of(what), steps=2) for what, plan in cases]


def check(names: list[tuple[str, str]], **options: Any) -> None:
    cases = [
        (
            what,
            default_plan(
                graph_of(what, **options),
                **({"num_microbatches": 2, "microbatch_size": 2} | LAYOUTS[layout]),
            ).model_copy(update=options),
        )
        for what, layout in names
    ]
    reports = run_ranks(compare, 2, cases)[0]
    for (what, layout), report in zip(names, reports, strict=True):
        assert report.passed, f"{what}, {layout}: {report}"


def test_plans_of_every_kind_equal_one_process():
    check(QUICK)


@pytest.mark.slow
def test_all_parts_under_all_plans():
    check(REST)


def train_by_wholes(plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    """What an optimizer that reads whole matrices, and decays, makes of experts in three steps."""
    torch.set_default_dtype(torch.float64)
    found = []
    for plan in plans:
        module = build("loop over experts")
        engine = planner.apply(plan, module, optimizer=decaying(module))
        for step in range(3):
            engine.step(batch_of(step))
        found.append(engine.full_state_dict())
        engine.close()
    return found


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return batch(4)


def decaying(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.05, weight_decay=0.5)


def test_an_expert_that_nothing_reaches_is_left_alone_by_optimizers_of_whole_parameters():
    """It decayed there, and moved by its moments, where one process passes it over."""
    torch.set_default_dtype(torch.float64)
    graph = graph_of("loop over experts")
    plans = [
        default_plan(graph, microbatch_size=2, **layout)
        for layout in (
            {"dp": 2, "num_microbatches": 1, "zero_stage": 1},
            {"dp": 2, "num_microbatches": 1, "zero_stage": 3},
            {"tp": 2, "num_microbatches": 2},
        )
    ]
    alone = OneProcess(build("loop over experts"), decaying)
    for step in range(3):
        alone.step(batch_of(step))
    assert alone.gradients().keys() < alone.parameters().keys()
    for state in run_ranks(train_by_wholes, 2, plans)[0]:
        torch.testing.assert_close(state, dict(alone.module.state_dict()), rtol=1e-10, atol=1e-12)


class Dropping(nn.Module):
    """Its gradient is what it multiplies by."""

    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5, self.training)


def test_draws_come_from_the_seed_alone_and_again_in_the_backward(monkeypatch):
    monkeypatch.setitem(opaque_modules._kept, "it", Dropping())
    x = torch.ones(64, 8, requires_grad=True)

    def drawn(seed):
        before = torch.get_rng_state()
        made = opaque_modules.opaque_module(
            "it", "model", (True, False), ((0,) * 5, (0,) * 5), [((64, 8), torch.float32, True)],
            (x,), ((opaque_modules.SEED, torch.tensor([seed])),), (),
        )  # fmt: skip
        assert torch.equal(torch.get_rng_state(), before), "the script's own numbers go on"
        torch.rand(3)  # others draw before the backward
        (grad,) = torch.autograd.grad(made.sum(), x)
        assert torch.equal(grad, made)
        return made

    first = drawn(5)
    assert torch.equal(first, drawn(5))
    assert not torch.equal(first, drawn(6))


def test_a_plan_in_bf16_equals_one_process():
    """`verify` runs the graph of the cast model, promoted."""
    check([("loop over experts", "dp"), ("item in a while loop", "tp")], precision="bf16")


def _of_rank(plan: Plan) -> tuple[list[float], list[Any]]:
    """Losses of two steps in real bf16, and the parameters of an expert that nothing reaches."""
    torch.manual_seed(0)
    engine = planner.apply(plan, partial(build, "loop over experts"))
    data = batch(4)
    losses = [float(engine.step(data)) for _ in range(3)]
    state = engine.full_state_dict()
    evaluated = float(engine.evaluate(data))
    names = [name for name in state if ".experts.3." in name]
    return [*losses, evaluated], [state[name] for name in sorted(names)]


def test_bf16_trains_evaluates_and_leaves_an_unreached_expert_alone():
    graph = graph_of("loop over experts", precision="bf16")
    plan = default_plan(graph, dp=2, microbatch_size=2, num_microbatches=1)
    losses, experts = run_ranks(_of_rank, 2, plan.model_copy(update={"precision": "bf16"}))[0]
    assert losses[2] < losses[0]
    first = build("loop over experts").state_dict()
    for name, found in zip(sorted(n for n in first if ".experts.3." in n), experts, strict=True):
        torch.testing.assert_close(found.float(), first[name], rtol=0, atol=0)


@pytest.mark.parametrize("what", PARTS)
def test_blocks_are_proven_one_by_one(what):
    graph = graph_of(what)
    plan = default_plan(graph, tp=2, pp=2, microbatch_size=2)
    proof = prove(plan, graph, source_of(what))
    assert [fault for part in proof.parts for fault in part.faults] == []


def _apply_once(plan: Plan) -> float:
    """A function that builds the model starts on the meta device, and is thrown away."""
    engine = planner.apply(plan, partial(build, "boolean indexing"))
    gc.collect()
    torch.manual_seed(1)
    data = batch(4)
    engine.step(data)
    return float(engine.evaluate(data))


def test_a_model_that_apply_builds_is_found_again_in_evaluation():
    plan = default_plan(graph_of("boolean indexing"), microbatch_size=4, num_microbatches=1)
    (found,) = run_ranks(_apply_once, 1, plan)
    torch.manual_seed(1)
    data = batch(4)
    module = build("boolean indexing")
    alone = OneProcess(module, lambda each: torch.optim.AdamW(each.parameters()))
    alone.step(data)
    assert found == pytest.approx(alone.module.eval()(*data).item(), rel=1e-6)
