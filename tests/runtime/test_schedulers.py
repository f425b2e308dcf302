"""Every learning-rate scheduler of torch, and param groups, train as in one process (fp64)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import planner
from planner.errors import ModelError
from planner.language.lowering.defaults import default_plan
from planner.runtime.state.optimizers.optimizer import check_schedulers
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny
from tests.runtime.beside import OneProcess

MAKE: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=2),
}


def test_every_scheduler_of_torch_is_tried():
    own = {
        name
        for name, found in vars(lr_scheduler).items()
        if inspect.isclass(found)
        and found.__module__ == lr_scheduler.__name__
        and name in lr_scheduler.__all__
    }
    assert own - {"LRScheduler"} == set(MAKE) - {"SWALR"}


def _groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay by name, as scripts have it."""
    named = list(module.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.02},
    ]


def test_the_engine_steps_a_scheduler_that_it_is_given():
    """Once an update, after what is told of the step: that has the rate it was made with."""
    module = MlpWithTarget()
    plan = default_plan(capture_tiny("mlp"), num_microbatches=2, microbatch_size=2)
    given = torch.optim.SGD(module.parameters(), lr=0.8)
    rates = lr_scheduler.ExponentialLR(given, 0.5)
    engine = planner.apply(plan, module, optimizer=given, scheduler=rates)
    told: list[float] = []
    engine.after_step.append(lambda _: told.append(given.param_groups[0]["lr"]))
    for update in (True, False, True, True):
        engine.step(mlp_batch(4), update=update)
    assert told == pytest.approx([0.8, 0.4, 0.4, 0.2])
    assert rates.get_last_lr() == pytest.approx([0.1])


def test_schedulers_that_the_engine_cannot_step_are_refused():
    module = MlpWithTarget()
    own, other = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    rates = lr_scheduler.StepLR(own, 2)
    assert check_schedulers(None, own) == ()
    assert check_schedulers([rates], [other, own]) == (rates,)
    for scheduler, message in (
        (lr_scheduler.StepLR(other, 2), "StepLR of another optimizer"),
        (lr_scheduler.ReduceLROnPlateau(own), "ReduceLROnPlateau.step needs metrics"),
        (0.1, "a float, which has no step"),
    ):
        with pytest.raises(ModelError, match=message):
            check_schedulers(scheduler, own)


@pytest.mark.parametrize("name", MAKE)
def test_a_scheduler_sets_what_it_sets_in_one_process(name):
    module = MlpWithTarget()
    alone = OneProcess(module, lambda each: torch.optim.SGD(_groups(each), lr=0.05, momentum=0.9))
    plan = default_plan(capture_tiny("mlp"), num_microbatches=2, microbatch_size=2)
    (single,) = alone.optimizers
    own_schedule = MAKE[name](single)
    given = torch.optim.SGD(_groups(module), lr=0.05, momentum=0.9)
    schedule = MAKE[name](given)  # before apply, as a script has it
    engine = planner.apply(plan, module, optimizer=given)
    for step in range(4):
        batch = tuple(each[4 * step :] for each in mlp_batch(4 * (step + 1)))
        loss = engine.step(batch).item()
        expected = alone.step(batch)
        assert loss == pytest.approx(expected, rel=1e-5)
        plateau = name == "ReduceLROnPlateau"
        schedule.step(*((loss,) if plateau else ()))
        own_schedule.step(*((expected,) if plateau else ()))
        assert [g["lr"] for g in given.param_groups] == [g["lr"] for g in single.param_groups]
        assert [g["momentum"] for g in given.param_groups] == [
            g["momentum"] for g in single.param_groups
        ]
    assert len({g["weight_decay"] for g in engine.optimizer.param_groups}) == 2
