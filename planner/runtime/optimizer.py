"""The user's optimizer over what this rank holds of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.errors import ModelError


def build_optimizer(
    given: Any, module: nn.Module, held: Mapping[str, Sequence[nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """Return an optimizer over the held parameters; None when this rank holds none.

    `given` is an optimizer over the module's parameters, whose param groups are pointed at
    what stands here for the same parameters (so a learning-rate scheduler on it goes on
    working); a class or function that makes one from parameters; or None for AdamW.
    `held` maps the user's parameter names to this rank's trainable copies. Optimizers see
    a rank's pieces: element-wise ones (SGD, Adam, AdamW, …) do the same as on the whole.
    Raises ModelError for an optimizer that has stepped already or is over other parameters.
    """
    params = [p for copies in held.values() for p in copies if p.requires_grad]
    if isinstance(given, torch.optim.Optimizer):
        _take_over(given, module, held)
        return given
    if not params:
        return None
    made = (given or torch.optim.AdamW)(params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(
            f"optimizer= made a {type(made).__name__}; give a torch optimizer, its class, or a "
            "function from parameters to one"
        )
    return made


def _take_over(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    held: Mapping[str, Sequence[nn.Parameter]],
) -> None:
    if optimizer.state:
        raise ModelError("the optimizer has stepped already; apply the plan before training")
    names = {id(p): fqn for fqn, p in module.named_parameters()}
    for group in optimizer.param_groups:
        fqns = [names.get(id(p)) for p in group["params"]]
        if None in fqns:
            raise ModelError(
                "the optimizer has parameters that are not the model's; "
                "make it from model.parameters() of the model given to apply"
            )
        group["params"] = [p for fqn in fqns for p in held.get(fqn or "", ()) if p.requires_grad]
