"""N20: evaluation as ``model.eval()`` means it: mode, outputs, metrics, under any plan (fp64)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner
from planner.errors import PlanError
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.step.evaluation import reads_mode
from tests.builders import MlpWithTarget, telling_first
from tests.captures import capture_module
from tests.model_matrix import REFUSED, model_matrix
from tests.spawn import run_ranks

RTOL = 1e-10
WIDTH, CLASSES = 8, 5


class Classifier(nn.Module):
    """Dropout, running statistics and a function that reads the mode."""

    def __init__(self, has_norm: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity() for _ in range(3)
        )
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, target):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.drop(torch.relu(norm(layer(x))))
            x = x + F.dropout(x, 0.3, self.training)
        return F.cross_entropy(self.head(x), target)


class WithoutNorm(Classifier):
    def __init__(self):
        super().__init__(has_norm=False)


class Branches(WithoutNorm):
    """Computes in evaluation what it does not in training."""

    def forward(self, x, target):
        if not self.training:
            x = torch.sigmoid(x)
        return super().forward(x, target)


def batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "target": torch.randint(CLASSES, (size,), generator=generator)}


def captured(kind):
    torch.set_default_dtype(torch.float64)
    try:
        return capture_module(kind(), batch(2), batch(3), name=kind.__name__)
    finally:
        torch.set_default_dtype(torch.float32)


def gaps(kind: Any, plans: list[Plan]) -> list[dict[str, float]]:
    """How far loss and logits in evaluation are from those of one process, on rank 0."""
    torch.set_default_dtype(torch.float64)
    found = []
    for plan in plans:
        torch.manual_seed(0)
        module = kind()
        engine = planner.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(2):
            engine.step(batch(plan.global_batch, step))
        state = engine.full_state_dict()
        seen = batch(plan.global_batch, 7)
        loss = engine.evaluate(seen, fetch=["head"]).item()
        logits = engine.fetched.get("head")
        assert engine.evaluate(seen).item() == loss
        assert engine.fetched == {}
        after = engine.full_state_dict()
        engine.step(batch(plan.global_batch, 9))  # training goes on
        engine.close()
        if logits is None:
            continue
        assert all(torch.equal(state[name], tensor) for name, tensor in after.items())
        alone = kind()
        alone.load_state_dict(state)
        alone.eval()
        outputs: list[torch.Tensor] = []
        alone.head.register_forward_hook(lambda *given, kept=outputs: kept.append(given[-1]))
        expected = alone(**seen).item()
        apart = (logits - outputs[0]).abs().max().item()
        found.append({"loss": abs(loss / expected - 1), "logits": apart})
    return found


LAYOUTS = [
    {"pp": 2, "num_microbatches": 2, "microbatch_size": 2},
    {"dp": 2, "num_microbatches": 2, "microbatch_size": 2},
    {"dp": 2, "num_microbatches": 1, "microbatch_size": 4, "zero_stage": 3},
    {"tp": 2, "num_microbatches": 2, "microbatch_size": 4},
    {"pp": 2, "num_microbatches": 2, "microbatch_size": 4, "recompute": "full"},
]


@pytest.mark.parametrize("kind", [Classifier, WithoutNorm])
@pytest.mark.filterwarnings(
    "ignore::planner.language.across.cut.batch_statistics.BatchStatisticsWarning"
)
def test_loss_and_outputs_are_those_of_the_model_after_eval(kind):
    """Nothing is dropped, norms read what the first replica's statistics came to."""
    graph = captured(kind)
    plans = [default_plan(graph, **layout) for layout in LAYOUTS]
    found = run_ranks(gaps, 2, kind, plans)[0]
    assert len(found) == len(LAYOUTS)
    for layout, gap in zip(LAYOUTS, found, strict=True):
        assert max(gap.values()) < RTOL, f"{layout}: {gap}"


def test_training_forwards_still_drop():
    torch.manual_seed(0)
    engine = planner.apply(default_plan(capture_of(WithoutNorm)), WithoutNorm())
    seen = {"x": torch.randn(2, WIDTH), "target": torch.tensor([1, 2])}
    assert engine.evaluate(seen).item() == engine.evaluate(seen).item()
    assert engine.forward(seen).item() != engine.forward(seen).item()
    engine.close()


def test_a_model_that_computes_something_else_in_evaluation_is_refused():
    engine = planner.apply(default_plan(capture_of(Branches)), Branches())
    seen = {"x": torch.randn(2, WIDTH), "target": torch.tensor([1, 2])}
    with pytest.raises(PlanError, match=r"computes what it does not in training: .*sigmoid"):
        engine.evaluate(seen)
    assert engine.step(seen).isfinite()
    engine.close()


def test_a_model_that_reads_no_mode_is_not_captured_again():
    assert not reads_mode(MlpWithTarget())
    assert reads_mode(Classifier())
    assert reads_mode(nn.Sequential(nn.Dropout(0.1)))


def capture_of(kind):
    seen = [
        {"x": torch.randn(size, WIDTH), "target": torch.zeros(size, dtype=torch.long)}
        for size in (2, 3)
    ]
    return capture_module(kind(), *seen, name=kind.__name__)


OTHERWISE = {"hf-mamba", "hf-mamba2"}
"""Models whose evaluation runs other ops than their training, which `evaluate` refuses."""


@pytest.mark.parametrize(
    "name", telling_first([name for name in model_matrix() if name not in REFUSED], {"vit"})
)
def test_evaluation_of_every_model(name):
    """On one rank, with much to drop: the loss is that of the model after ``eval()`` (fp32)."""
    tiny = model_matrix()[name]
    torch.manual_seed(0)
    module = tiny.build()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3
    alone = copy.deepcopy(module).eval()
    graph = capture_module(module, tiny.batch(2), tiny.batch(3), loss=tiny.loss, name=name)
    plan = default_plan(graph, num_microbatches=1, microbatch_size=4)
    engine = planner.apply(plan, module, loss=tiny.loss)
    batch = tiny.batch(4)
    if name in OTHERWISE:
        with pytest.raises(PlanError, match="in evaluation mode the model computes what it does"):
            engine.evaluate(batch)
        return
    with torch.no_grad():
        expected = loss_of(call_with_batch(alone, batch), batch, tiny.loss).item()
    assert engine.evaluate(batch).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    engine.close()
