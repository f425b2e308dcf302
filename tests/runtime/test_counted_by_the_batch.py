"""N1: labels and weights of classes that are made of the whole batch count in parts as in it.

What a part counts for in a mean over labels is counted of its own labels, by weights that the whole
batch gives: not by those that the part would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.step.engine import Engine
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, train_beside
from tests.spawn import run_ranks

CLASSES, WIDTH, LENGTH = 6, 8, 4
RTOL = 1e-9


def frequent(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp(min=0), CLASSES).sum((0, 1)).double()


def ce(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rare": lambda z, y, w: ce(z, y, weight=1 / (frequent(y) + 1)),
    "rare, smoothed": lambda z, y, w: ce(
        z, y, weight=frequent(y).sum() / (frequent(y) + 1), label_smoothing=0.1
    ),
    "rare beside other terms": lambda z, y, w: (
        ce(z, y, weight=1 / (frequent(y) + 1)) + 0.3 * ce(z, y) + z.square().mean()
    ),
    "rare, by a buffer": lambda z, y, w: ce(z, y, weight=w / (frequent(y) + 1)),
    "all but the last class": lambda z, y, w: ce(z, torch.where(y == y.max(), -100, y)),
    "moved by the batch": lambda z, y, w: ce(z, (y.clamp(min=0) + y.clamp(min=0).sum()) % CLASSES),
    "of another sample": lambda z, y, w: ce(
        z, torch.where(y.roll(1, 0) == y, -100, y), weight=1 / (frequent(y) + 1)
    ),
    "sorted": lambda z, y, w: ce(z, y.sort(0).values),
}
IN_ORDER = ("of another sample", "sorted")
"""Those that the order of samples changes: own parts have no order among them."""


class Tagger(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weights", torch.rand(CLASSES))
        self._loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.second(torch.tanh(self.first(x)))
        return LOSSES[self._loss](logits, labels, self.weights)


def batch(size: int, seed: int = 0) -> dict[str, Tensor]:
    """Of which the first half has few labels, which are rare in the second."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size, LENGTH), generator=drawn)
    labels[: size // 2] %= 2
    labels[: size // 2, 1:] = -100
    x = torch.randn(size, LENGTH, WIDTH, generator=drawn, dtype=torch.float64)
    return {"x": x, "labels": labels}


def own_part(engine: Engine, whole: dict[str, Tensor]) -> planner.OwnPart:
    size = len(whole["x"])
    rows = torch.arange(size).chunk(engine.num_replicas)[engine.replica]
    return planner.OwnPart({name: tensor[rows] for name, tensor in whole.items()})


def gaps(cases: list[tuple[str, Plan, bool]]) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for loss, plan, is_own in cases:
        torch.manual_seed(0)
        module = Tagger(loss)

        def sgd(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.5)

        alone = OneProcess(module, sgd)
        engine = planner.apply(plan, module, optimizer=sgd(module))
        given = own_part if is_own else (lambda _, whole: whole)
        batches = [batch(size, seed) for seed, size in enumerate((8, 7, 8))]
        apart = train_beside(
            engine, alone, batches, given=given, evaluates=True, gap=gap_to_largest
        )
        found[f"{loss} {plan.degrees} own {is_own}"] = apart.largest
        engine.close()
    return found


def check(layouts: list[dict[str, Any]]) -> None:
    cases = []
    torch.set_default_dtype(torch.float64)
    try:
        for at, loss in enumerate(LOSSES):
            torch.manual_seed(0)
            graph = capture_module(Tagger(loss), batch(2), batch(3), name=f"tagger {at}")
            for layout in layouts:
                plan = default_plan(graph, **layout)
                is_own = at % 2 == 0 and layout.get("dp", 1) > 1 and loss not in IN_ORDER
                cases += [(loss, plan, own) for own in ((False, True) if is_own else (False,))]
    finally:
        torch.set_default_dtype(torch.float32)
    for found in run_ranks(gaps, 2, cases):
        assert {case: gap for case, gap in found.items() if not gap < RTOL} == {}


def test_replicas_and_microbatches_count_as_the_batch_does():
    check([{"dp": 2, "num_microbatches": 2, "microbatch_size": 2}])


@pytest.mark.slow
def test_stages_and_shards_count_as_the_batch_does():
    check(
        [
            {"pp": 2, "num_microbatches": 4, "microbatch_size": 2},
            {"dp": 2, "num_microbatches": 2, "microbatch_size": 2, "zero_stage": 3},
        ]
    )
