"""The user's module after `planner.apply`: what is done to it then reaches no rank's stages.

The engine holds copies of the weights, and programs that were captured before. Freezing a
parameter, setting a hook or changing to evaluation mode afterwards would change the plain
script's training, and not the engine's. Such a change is refused at the next step.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.capture.checks.hooks import tensor_hooks
from planner.errors import PlanError


class Untouched:
    """Compares a module with what it was when this was made. Immutable but for the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = [(name, part, _of_part(part)) for name, part in module.named_modules()]
        self._params = [
            (name, param, _of_param(param)) for name, param in module.named_parameters()
        ]

    def check(self) -> None:
        """Raise PlanError, naming what changed, when the module is not what it was."""
        for name, param, before in self._params:
            if _of_param(param) != before:
                self._refuse(f"parameter {name}", _PARAM, before, _of_param(param))
        for name, part, before in self._parts:
            if _of_part(part) != before:
                self._refuse(f"module {name or 'model'}", _PART, before, _of_part(part))

    @staticmethod
    def _refuse(
        what: str, fields: tuple[str, ...], before: tuple[Any, ...], now: tuple[Any, ...]
    ) -> None:
        field, old, new = next(
            (field, old, new)
            for field, old, new in zip(fields, before, now, strict=True)
            if old != new
        )
        raise PlanError(
            f"{field} of {what} was {old} when the plan was applied and is {new}; the engine "
            "trains what was captured then: make such changes before planner.apply"
        )


_PARAM = ("requires_grad", "the number of gradient hooks")
_PART = ("training", "the number of hooks")


def _of_param(param: nn.Parameter) -> tuple[Any, ...]:
    return param.requires_grad, len(tensor_hooks(param))


def _of_part(part: nn.Module) -> tuple[Any, ...]:
    hooks = (
        part._forward_hooks,
        part._forward_pre_hooks,
        part._backward_hooks,
        part._backward_pre_hooks,
    )
    return part.training, sum(map(len, hooks))
