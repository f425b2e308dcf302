"""The user's optimizer over what this rank holds of the model."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import ModelError
from planner.layout.axes import split_axes


def build_optimizer(
    given: Any,
    module: nn.Module,
    held: Mapping[str, Sequence[nn.Parameter]],
    *,
    is_cut: bool = False,
) -> torch.optim.Optimizer | None:
    """Return an optimizer over the held parameters; None when this rank holds none.

    `given` is an optimizer over the module's parameters, whose param groups are pointed at
    what stands here for the same parameters (so a learning-rate scheduler on it goes on
    working); a class or function that makes one from parameters; or None for AdamW.
    `held` maps the user's parameter names to this rank's trainable copies. Optimizers see
    a rank's pieces: element-wise ones (SGD, Adam, AdamW, …) do the same as on the whole. Of
    others, such as Adafactor or Muon, which read rows, columns or whole matrices, the update is
    another one where `is_cut` says that parameters are.
    Raises ModelError for an optimizer that has stepped already, is over other parameters, has
    hooks on its step, or would do something else on pieces.
    """
    optimizer = _built(given, module, held)
    if optimizer is not None:
        _check_step(optimizer)
        by_element = works_by_element(optimizer) if is_cut else True
        if by_element is None:
            warnings.warn(
                f"the plan cuts parameters over ranks, and whether {type(optimizer).__name__} does "
                "the same on pieces can't be told; if it reads more than an element's own values, "
                "the training is another one",
                stacklevel=2,
            )
        if by_element is False:
            raise ModelError(
                f"{type(optimizer).__name__} updates an element by others of its parameter, and "
                "the plan cuts parameters over ranks, which would change the training; use an "
                "element-wise optimizer (SGD, Adam, AdamW, ...), or search with "
                f"{', '.join(f'`{axis.name}` 1' for axis in split_axes())} and `zero` 0"
            )
    return optimizer


def _built(
    given: Any, module: nn.Module, held: Mapping[str, Sequence[nn.Parameter]]
) -> torch.optim.Optimizer | None:
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


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"{type(optimizer).__name__} evaluates the model several times in a step, which the "
            "engine does not; use an optimizer whose step() needs no closure"
        )
    hooks = {
        **_global_optimizer_pre_hooks,
        **_global_optimizer_post_hooks,
        **optimizer._optimizer_step_pre_hooks,
        **optimizer._optimizer_step_post_hooks,
    }
    if hooks:
        raise ModelError(
            f"{type(optimizer).__name__} has a hook on its step, which would see only this rank's "
            "pieces of parameters and gradients; clip with planner.apply(max_grad_norm=...), and "
            "do the rest after engine.step"
        )


def works_by_element(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether an optimizer does the same to a matrix as to its quarters; None where it can't tell.

    Two steps of copies of it, with its own settings, are compared.
    """
    generator = torch.Generator().manual_seed(0)
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}

    def trained(cut: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        params = [nn.Parameter(piece.clone()) for piece in cut(start)]
        probe = copy.copy(optimizer)
        probe.state = defaultdict(dict)
        probe.param_groups = [settings | {"params": params}]
        for grad in grads:
            for param, piece in zip(params, cut(grad), strict=True):
                param.grad = piece.clone()
            type(probe).step(probe)  # the class's own: schedulers wrap that of the object
        return [param.detach() for param in params]

    with _disable_current_modes():  # a dry run's tensors have no values to compare
        start, *grads = torch.randn(3, 8, 8, dtype=torch.float64, generator=generator)
        try:
            (whole,) = trained(lambda tensor: [tensor])
            pieces = trained(_quarters)
        except Exception:
            return None
        return all(map(torch.allclose, pieces, _quarters(whole)))


def _quarters(tensor: Tensor) -> list[Tensor]:
    return [part for half in tensor.chunk(2, 0) for part in half.chunk(2, 1)]
