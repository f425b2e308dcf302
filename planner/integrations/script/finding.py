"""Finds the model that a script trains: the module that is called in training, outermost, whose
parameters an optimizer has.
"""

from __future__ import annotations

import torch
from torch import nn

from planner.errors import PlanError


class Found:
    """A model, and the optimizer over its parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer


class Finding:
    """Watches optimizers and calls. Mutable: optimizers in the order in which they were made."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer."""
        self.optimizers.append(optimizer)

    def found(self, module: nn.Module) -> Found | None:
        """Return the model that this call trains; None where it trains none.

        Raises PlanError where an optimizer trains more than this module, or another one trains
        too: one plan is for one model.
        """
        if not (self.optimizers and module.training and torch.is_grad_enabled()):
            return None
        own = {id(param) for param in module.parameters() if param.requires_grad}
        over = [each for each in self.optimizers if not own.isdisjoint(_params(each))]
        if not over:
            return None
        name = type(module).__name__
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise PlanError(
                f"the model is wrapped by {name}, and the plan says what each device does; "
                "leave it out"
            )
        if len(over) > 1:
            raise PlanError(
                f"{len(over)} optimizers have parameters of the {name}, and a loop that is taken "
                "over has one; give its groups to one optimizer, or use planner.apply with a list"
            )
        (optimizer,) = over
        if beyond := sum(1 for each in _params(optimizer) if each not in own):
            raise PlanError(
                f"the {type(optimizer).__name__} trains {beyond} parameters beside those of the "
                f"{name} that is called here; a plan is for one module that is called as a whole: "
                "put the parts into one nn.Module whose forward calls them"
            )
        if hasattr(module, "_orig_mod"):
            raise PlanError(
                "the model is compiled by torch.compile, and the plan says what is compiled; leave "
                "it out"
            )
        return Found(module, optimizer)


def _params(optimizer: torch.optim.Optimizer) -> set[int]:
    return {
        id(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    }
