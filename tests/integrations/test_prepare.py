"""N22: a loop of forward, backward and optimizer.step() trains by a plan as in one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.captures import capture_module
from tests.spawn import run_ranks

WIDTH, SAMPLES, STEPS = 8, 24, 6


class Net(nn.Module):
    """A stack whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, target):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, target)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x, target = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "target": target}


def batch(size):
    return {name: torch.zeros(size, WIDTH, dtype=torch.float64) for name in ("x", "target")}


def loop(model: Any, optimizer: Any, loader: Any, scheduler: Any, accumulate: int) -> list[float]:
    """The user's loop: nothing in it is of planner."""
    losses: list[float] = []
    model.train()
    while len(losses) < STEPS:
        for part in loader:
            loss = model(**part)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if len(losses) % accumulate == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return losses


def pieces(module: nn.Module, batch_size: int) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return module, optimizer, DataLoader(Data(), batch_size=batch_size), scheduler


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def trained(plans: list[Plan], accumulate: int) -> list[Any]:
    found = []
    for plan in plans:
        made = planner.prepare(plan, *pieces(build(), plan.global_batch), accumulate=accumulate)
        losses = loop(*made, accumulate)
        found.append((losses, made[0].state_dict()))
        made[0].engine.close()
    return found


def plan_of(**layout: Any) -> Plan:
    return default_plan(capture_module(build(), batch(2), batch(3)), **layout)


LAYOUTS = [
    {"pp": 2, "num_microbatches": 2, "microbatch_size": 4},
    {"dp": 2, "num_microbatches": 2, "microbatch_size": 2, "zero_stage": 2},
    {"tp": 2, "num_microbatches": 2, "microbatch_size": 4},
]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_as_it_is_trains_as_in_one_process(accumulate):
    plans = [plan_of(**layout) for layout in LAYOUTS]
    module, *others = pieces(build(), plans[0].global_batch)
    expected = loop(module, *others, accumulate)
    for losses, state in run_ranks(trained, 2, plans, accumulate)[0]:
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state, dict(module.state_dict()), rtol=1e-10, atol=1e-12)


def prepared(**options: Any) -> Any:
    return planner.prepare(plan_of(num_microbatches=1, microbatch_size=4), *pieces(build(), 4),
                           **options)  # fmt: skip


def test_a_loop_that_counts_otherwise_is_told():
    model, optimizer, loader, _ = prepared()
    first, second, *_ = loader
    with pytest.raises(PlanError, match="another batch than the prepared loader gave last"):
        model(**first)
    parts = iter(loader)
    model(**next(parts))
    with pytest.raises(PlanError, match=r"called 2 times for one optimizer.step.* accumulate=1"):
        model(**next(parts))
    optimizer.step()
    with pytest.raises(PlanError, match="came after 0 calls"):
        optimizer.step()
    with pytest.raises(PlanError, match="for clipping give"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PlanError, match="not in both ways"):
        model(second["x"], target=second["target"])


@pytest.mark.parametrize(
    ("accumulate", "factors", "says"),
    [
        (1, (3.0,), "takes 3 times the loss of a call.* mean of 1 calls"),
        (2, (1.0, 1.0), r"takes 1 times the loss of a call.* mean of 2 calls \(0.5 times each\)"),
        (2, (0.5, None), "takes 0 times the loss"),
        (1, (None,), ""),  # a loop without backwards
    ],
)
def test_a_loop_that_trains_on_another_multiple_of_the_loss_is_told(accumulate, factors, says):
    """One process would have the sum of two losses that are not divided: twice the gradients."""
    model, optimizer, loader, _ = prepared(accumulate=accumulate)
    for part, factor in zip(loader, factors, strict=False):
        loss = model(**part)
        if factor is not None:
            (loss * factor).backward()
    with pytest.raises(PlanError, match=says) if says else nullcontext():
        optimizer.step()


def test_gradients_are_not_dropped_in_silence():
    model, optimizer, loader, _ = prepared(accumulate=2)
    for each in (optimizer, model):
        each.zero_grad()
    model(**next(iter(loader)))
    for each in (optimizer, model):
        with pytest.raises(PlanError, match=r"zero_grad\(\) came after 1 of 2 calls of the model"):
            each.zero_grad()


def test_a_loader_that_has_a_sampler_of_batches_is_taken():
    module, optimizer, _, _ = pieces(build(), 4)
    given = DataLoader(Data(), batch_sampler=[[3, 2, 1, 0], [4, 5, 6, 7]])
    plan = plan_of(num_microbatches=1, microbatch_size=4)
    _, _, loader, _ = planner.prepare(plan, module, optimizer, given)
    assert [part["x"].tolist() for part in loader] == [
        torch.stack([Data()[n]["x"] for n in order]).tolist() for order in given.batch_sampler
    ]


def test_evaluation_takes_whole_batches_and_leaves_the_count():
    model, optimizer, _, _ = prepared(accumulate=2)
    alone = copy.deepcopy(build())
    given = {name: torch.stack([Data()[n][name] for n in range(4)]) for name in ("x", "target")}
    assert model.eval()(**given).item() == pytest.approx(alone(**given).item(), rel=1e-12)
    assert model(**given)["loss"] is not None
    with pytest.raises(PlanError, match="came after 0 calls"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.01
