"""Odd but realistic models train under dp, tp, pp and ZeRO as in one process: five steps, fp64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import planner
from planner.errors import LayoutError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_to_largest, train_beside
from tests.spawn import run_ranks
from tests.user_models import USER_MODELS, Stack, batch

STEPS = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "zero 2": {"dp": 2, "zero_stage": 2},
    "zero 3": {"dp": 2, "zero_stage": 3},
}
QUICK = [
    ("dict of losses", "pp"),
    ("shared", "pp"),
    ("numbers", "zero 1"),
    ("numbers", "zero 3"),
    ("not contiguous", "zero 2"),
    ("checkpointed", "tp"),
    ("sparse tables", "pp"),
    ("an optimizer that goes by names", "zero 1"),
]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return USER_MODELS[name].build()


def plan_of(name: str, layout: str) -> Plan:
    options = LAYOUTS[layout]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        graph = capture_module(
            built(name), batch(2), batch(3), loss=USER_MODELS[name].loss, name=name
        )
        size = 2 // options.get("dp", 1)
        return default_plan(graph, num_microbatches=4, microbatch_size=size, **options)
    finally:
        torch.set_default_dtype(before)


def train(cases: list[tuple[str, Plan]]) -> list[float]:
    """How far losses, gradients and parameters are from one process, on this rank."""
    torch.set_default_dtype(torch.float64)
    return [_train(name, plan) for name, plan in cases]


def _train(name: str, plan: Plan) -> float:
    user, module = USER_MODELS[name], built(name)
    alone, given = OneProcess(module, user.optimizer, loss=user.loss), user.optimizer(module)
    schedules = [user.schedule(each) for each in (given, *alone.optimizers) if user.schedule]
    engine = planner.apply(
        plan, module, optimizer=given, loss=user.loss, scheduler=schedules[0] if schedules else None
    )

    def batches() -> Iterator[Any]:
        for step in range(STEPS):
            torch.manual_seed(step)
            yield batch(plan.global_batch)
            for schedule in schedules[1:] if dist.get_rank() == 0 else ():
                schedule.step()  # where the one process is

    def copied(_: Any, data: Any) -> Any:
        return {key: value.clone() for key, value in data.items()}

    return train_beside(engine, alone, batches(), given=copied, gap=gap_to_largest).largest


def _check(cases: list[tuple[str, str]]) -> None:
    plans = [(name, plan_of(name, layout)) for name, layout in cases]
    for case, found in zip(cases, zip(*run_ranks(train, 2, plans), strict=True), strict=True):
        assert max(found) < 1e-10, (case, found)


def test_the_most_telling_of_them():
    _check(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", USER_MODELS)
def test_each_under_every_layout(name):
    """But for blocks that share a parameter and cut it in two ways, which are refused."""
    _check([(name, layout) for layout in LAYOUTS if (name, layout) not in DISAGREEING])


DISAGREEING = [("auxiliary losses", "tp"), ("shared", "tp"), ("own teacher", "tp")]
"""`default_plan` looks at each block alone; a search holds such parameters alike."""


class TwoDtypes(Stack):
    """Norms of a wider dtype than the layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        for layer in self.layers:
            layer.norm.double()

    def each(self, index, x):
        layer = self.layers[index]
        return x + layer.down(F.gelu(layer.up(layer.norm(x.double()).float())))


def refused(plan: Plan) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            planner.apply(plan, TwoDtypes())
        except LayoutError as error:
            return str(error)
    return ""


def test_a_block_of_two_dtypes_is_refused_under_zero():
    graph = capture_module(TwoDtypes(), *(
        {k: v.float() for k, v in batch(size).items()} for size in (2, 3)
    ))  # fmt: skip
    plan = default_plan(graph, num_microbatches=1, microbatch_size=2, dp=2, zero_stage=1)
    for message in run_ranks(refused, 2, plan):
        assert "those of a block have several dtypes" in message
