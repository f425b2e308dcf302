"""V14: bf16 parameters, fp32 master copies, fp32 sums of gradients.

Beside a plan runs one process written out plainly: the module cast to bf16, fp32 copies,
each microbatch's gradient added to an fp32 sum, torch's AdamW on the copies, and back.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.capture.source.model_file import ModelSource
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.verify import compare_with_one_process
from planner.runtime.step.engine import Engine
from tests.builders import VOCABULARY, PlainGPT, gpt_batch, telling_first, tiny_models
from tests.captures import capture_module
from tests.experts import RoutedGPT
from tests.runtime.beside import (
    Gaps,
    InShortDtype,
    check_layout_in_fp64,
    gap_to_largest,
    train_beside,
)
from tests.spawn import run_ranks

STEPS = 3


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)


class GPT(PlainGPT):
    """Casts its logits for the loss, as models trained in bf16 do."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, ids, labels):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


class TiedGPT(GPT):
    """Token table and head are one parameter, on the first and on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.token.weight


def seeded(kind: type[GPT] = GPT) -> GPT:
    torch.manual_seed(0)
    return kind()


def plan_for(precision="bf16", kind: type[GPT] = GPT, **choices) -> Plan:
    graph = capture_module(kind(), gpt_batch(2), gpt_batch(3), precision=precision)
    plan = default_plan(graph, **choices)
    return plan.model_copy(update={"precision": precision})


def train(cases: list[tuple[type[GPT], Plan]]) -> list[tuple[Gaps, set[torch.dtype]]]:
    """How far from one process each is, and the types of its whole parameters."""
    return [_train(kind, plan) for kind, plan in cases]


def _train(kind: type[GPT], plan: Plan) -> tuple[Gaps, set[torch.dtype]]:
    module = seeded(kind)
    alone = InShortDtype(
        seeded(kind), adamw, nn.Module.bfloat16,
        replicas=plan.dp, num_microbatches=plan.num_microbatches,
    )  # fmt: skip
    engine = planner.apply(plan, module, optimizer=adamw(module))
    size = plan.global_batch
    batches = [{k: v[-size:] for k, v in gpt_batch(size + step).items()} for step in range(STEPS)]
    gaps = train_beside(engine, alone, batches, gap=gap_to_largest)
    return gaps, {t.dtype for t in engine.full_state_dict().values()}


def test_bf16_plans_compute_what_one_process_computes():
    """Bit for bit where sums have the same order; else as far as rounding to bf16 reaches."""
    exact = {
        "pp2": {"pp": 2, "num_microbatches": 4},
        "dp2": {"dp": 2, "num_microbatches": 3},
        "dp2 ZeRO-1": {"dp": 2, "num_microbatches": 3, "zero_stage": 1},
        "pp2, weight gradients apart": {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
        "pp2 recomputed": {"pp": 2, "num_microbatches": 2, "recompute": "selective"},
    }
    close = {
        "dp2 ZeRO-2": {"dp": 2, "num_microbatches": 3, "zero_stage": 2},
        "dp2 ZeRO-3": {"dp": 2, "num_microbatches": 3, "zero_stage": 3},
        "tp2": {"tp": 2, "num_microbatches": 2},
        # One process adds the two uses of a tied weight in bf16, we in fp32.
        "pp2 tied": {"pp": 2, "num_microbatches": 2, "kind": TiedGPT},
        # An expert's product is over rows of both replicas.
        "ep2": {"dp": 2, "ep": 2, "num_microbatches": 2, "kind": RoutedGPT},
        # Each rank has other experts, which have masters of their own.
        "ep2 beside ZeRO": {
            "dp": 2, "ep": 2, "num_microbatches": 2, "zero_stage": 1, "kind": RoutedGPT,
        },
    }  # fmt: skip
    cases = exact | close
    plans = [(c.get("kind", GPT), plan_for(**c)) for c in cases.values()]
    answers = run_ranks(train, 2, plans)[0]
    for name, (gap, dtypes) in zip(cases, answers, strict=True):
        assert dtypes == {torch.float32}, name
        if name in exact:
            assert gap.gradient == gap.parameter == 0, f"{name}: {gap}"
            assert gap.loss < 1e-6, f"{name}: {gap}"
        elif name.startswith("dp2 ZeRO"):
            assert gap.gradient < 1e-5, f"{name}: {gap}"
            assert gap.parameter < 1e-5, f"{name}: {gap}"
        else:
            assert gap.gradient < 5e-2, f"{name}: {gap}"
            assert gap.loss < 1e-3, f"{name}: {gap}"


class Scaled(nn.Module):
    """The gradient of its weight is the mean of x: each microbatch adds what x says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.fc = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return (self.fc(x) * 0 + x * self.weight).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_small_terms_of_a_gradient_are_not_lost(schedule):
    """Eight microbatches of gradient 1 and 2**-9: bf16 would keep the sum at 1."""
    x = torch.tensor([[1.0]] + [[2.0**-9]] * 7)
    module = Scaled()
    graph = capture_module(module, (x[:2],), (x[:3],), precision="bf16")
    plan = default_plan(graph, num_microbatches=8, schedule=schedule)
    engine = planner.apply(plan.model_copy(update={"precision": "bf16"}), module)
    engine.step((x,))
    expected = (1 + 7 * 2**-9) / 8
    assert engine.full_gradients()["weight"].item() == expected
    in_bf16 = sum((t for t in x[1:, 0].bfloat16()), x[0, 0].bfloat16()) / 8
    assert in_bf16.item() == 1 / 8  # what the engine avoids


def train_both_precisions(plans: list[Plan]) -> list[list[float]]:
    losses = []
    for plan in plans:
        module = seeded()
        engine = planner.apply(
            plan, module, optimizer=torch.optim.AdamW(module.parameters(), lr=3e-3)
        )
        batch = gpt_batch(plan.global_batch)
        losses.append([engine.step(batch).item() for _ in range(20)])
    return losses


def test_twenty_steps_in_bf16_stay_close_to_fp32():
    choices = {"pp": 2, "num_microbatches": 4}
    plans = [plan_for(precision, **choices) for precision in ("model", "bf16")]
    in_fp32, in_bf16 = run_ranks(train_both_precisions, 2, plans)[0]
    assert in_fp32[-1] < 0.75 * in_fp32[0]
    assert max(abs(a - b) for a, b in zip(in_fp32, in_bf16, strict=True)) < 0.01 * in_fp32[0]


def test_the_users_optimizer_and_scheduler_act_on_the_masters():
    """Param groups keep their settings, and a step below bf16's grain is not lost."""
    module = seeded()
    groups = [
        {"params": [module.token.weight], "lr": 0.0},
        {"params": [p for p in module.parameters() if p is not module.token.weight]},
    ]
    optimizer = torch.optim.SGD(groups, lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    engine = planner.apply(plan_for(num_microbatches=2), module, optimizer=optimizer)
    assert all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    moved = []
    for _ in range(3):
        engine.step(gpt_batch(2))
        schedule.step()
        moved.append(engine.full_state_dict())
    assert torch.equal(moved[2]["token.weight"], before["token.weight"])
    name = "layers.0.norm1.weight"  # ones, whose bf16 neighbours are 2**-8 away
    assert 0 < (moved[0][name] - 1).abs().max() < 2**-9
    assert not torch.equal(moved[0][name], moved[1][name])
    assert torch.equal(moved[1][name], moved[2][name])
    held = _parameters(engine)
    assert {p.dtype for p in held.values()} == {torch.bfloat16}
    for fqn, param in held.items():
        assert torch.equal(param, moved[2][fqn].bfloat16())


def _parameters(engine: Engine) -> dict[str, nn.Parameter]:
    return {n: p for stage in engine.stages.values() for n, p in stage.named_params().items()}


def test_verify_proves_the_layout_of_a_bf16_plan():
    """In fp64 with the plan's own cut and layouts, and it says so."""
    check_layout_in_fp64(plan_for(tp=2, num_microbatches=2), GPT)


@pytest.mark.parametrize("name", telling_first(telling={"batchnorm-mlp", "resnet", "hf-llama"}))
def test_any_model_trains_in_bf16(name):
    """Its cast capture is the model (in fp64, against the module), and its first loss is near."""
    tiny = tiny_models()[name]
    if tiny.needs_transformers:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = tiny.build()
    graph = capture_module(
        module, tiny.batch(2), tiny.batch(3), loss=tiny.loss, name=name, precision="bf16"
    )
    plan = default_plan(graph, microbatch_size=4, num_microbatches=1).model_copy(
        update={"precision": "bf16"}
    )
    source = ModelSource(
        path=Path("model.py"), build=tiny.build, batch=tiny.batch, loss=tiny.loss, dependencies=()
    )
    report = compare_with_one_process(plan, source, steps=1, graph=graph)
    assert report.passed
    batch = tiny.batch(4)
    expected = loss_of(call_with_batch(copy.deepcopy(module), batch), batch, tiny.loss).item()
    engine = Engine(plan, graph, module, build_mesh(plan, torch.device("cpu")))
    first = engine.step(batch).item()
    assert first == pytest.approx(expected, rel=5e-3)
    assert engine.step(batch).item() < first
