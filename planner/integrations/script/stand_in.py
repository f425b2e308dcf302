"""Methods of a script's optimizer that reach its loop."""

from __future__ import annotations

from typing import Any

import torch

from planner.errors import PlanError
from planner.integrations.script.taken import Loop


def stand_in(loop: Loop) -> None:
    """Let the methods of a script's optimizer reach its loop.

    A learning-rate scheduler has replaced `step` of it, to count; its count goes on.
    """
    optimizer: Any = loop.optimizer

    def step(closure: Any = None) -> None:
        optimizer._opt_called = True
        loop.update(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def load_state_dict(state: Any) -> None:
        raise PlanError(
            "optimizer.load_state_dict in the midst of a training; load before the first step of a "
            "script, or train by planner.apply, whose engine.load goes on from a checkpoint"
        )

    def add_param_group(group: Any) -> None:
        raise PlanError(
            "optimizer.add_param_group in the midst of a training; give all parameters before the "
            "first step, those that train later with a learning rate of 0"
        )

    def zero_grad(set_to_none: bool = True) -> None:
        loop.clear(set_to_none, of_model=False)

    optimizer.step, optimizer.zero_grad = step, zero_grad
    optimizer.state_dict = lambda: state_dict_of(loop)
    optimizer.load_state_dict, optimizer.add_param_group = load_state_dict, add_param_group


def state_dict_of(loop: Loop) -> dict[str, Any]:
    """Return the state dict of an optimizer that one process has."""
    optimizer = loop.optimizer
    if not loop.is_begun:
        return type(optimizer).state_dict(optimizer)
    states = loop.command("optimizer_state")
    names = {id(param): name for name, param in loop.model.named_parameters()}
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            numbers.setdefault(id(param), len(numbers))
        own = [numbers[id(param)] for param in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": own})
    state = {
        numbers[at]: states[name]
        for at, name in names.items()
        if at in numbers and states.get(name)
    }
    return {"state": state, "param_groups": groups}


def refuse_step(loop: Loop, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer beside the loop's refuse to step."""

    def step(closure: Any = None) -> None:
        loop.refuse_second(optimizer)

    optimizer.step = step  # type: ignore[method-assign, assignment]
