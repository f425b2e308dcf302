"""The user's optimizer over what this rank holds of the model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from planner.errors import ModelError
from planner.language.layout.axes import split_axes
from planner.runtime.process.device import is_accelerator
from planner.runtime.state.optimizers.reach import fresh_state, reaches
from planner.runtime.state.optimizers.several import Several

OWN_SCHEDULER = "scheduler of the engine "
"""Under which names checkpoints have the schedulers that the engine steps."""

OWN_SCALER = "loss scaler of the engine"
"""Under which name checkpoints have what scales the loss of precision "fp16"."""


def build_optimizer(
    given: Any, module: nn.Module, held: Mapping[str, Sequence[nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """Return an optimizer over the held parameters; None when this rank holds none.

    `given` is an optimizer over the module's parameters, whose param groups are pointed at
    what stands here for the same parameters (so a learning-rate scheduler on it goes on
    working); several of these, each over some of the parameters; a class or function that makes
    one from parameters; or None for AdamW. `held` maps the user's parameter names to this rank's
    trainable copies. Raises ModelError for an optimizer that has stepped already, is over other
    parameters, has hooks on its step, or evaluates the model in it.
    """
    if isinstance(given, (list, tuple)):
        given = Several(given)
    optimizer = _built(given, module, held)
    if optimizer is not None:
        for each in optimizer.parts if isinstance(optimizer, Several) else (optimizer,):
            _check_step(each)
    return optimizer


def read_beyond_elements(
    optimizer: torch.optim.Optimizer, *, is_cut: bool, is_spread: bool
) -> list[nn.Parameter]:
    """Return the parameters that the optimizer must have whole, where the plan cuts some.

    `is_cut` says that ranks hold pieces of parameters, `is_spread` that a rank does not hold all
    of the model. Raises ModelError for an optimizer that would do something else on a part of it.
    """
    found: list[nn.Parameter] = []
    for group, reach in zip(optimizer.param_groups, reaches(optimizer), strict=True):
        if reach == "model" and (is_cut or is_spread):
            sizes = ", ".join(f"`{axis.name}` 1" for axis in split_axes())
            raise ModelError(
                f"{type(optimizer).__name__} updates a parameter by the gradients of others or by "
                "its place among them, and the plan gives each rank a part of the model; use "
                f"another optimizer, or search with `pp` 1, {sizes}, `ep` 1 and `zero` 0"
            )
        if reach is None and is_cut:
            warnings.warn(
                f"{type(optimizer).__name__} does not step on small matrices alone, so what it "
                "reads can't be measured: parameters that the plan cuts are made whole for it; if "
                "it reads other parameters too, the training is another one",
                stacklevel=2,
            )
        # What can't be measured is made whole, too: a whole parameter is right under either reach.
        if reach != "element" and is_cut:
            found += group["params"]
    return found


_FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose loops over lists make temporary copies of all they step on."""


def use_fused_kernels(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let Adam and AdamW of a run on an accelerator step by fused kernels, where the user chose
    no kernels.

    PyTorch's own choice on CUDA are loops over lists (`foreach`), whose denominators take as many
    bytes as the parameters at the peak of a step: memory that neither the plan's price nor its dry
    run has. What a fused kernel does for an element is the same, but for rounding.
    """
    if not is_accelerator(device):
        return
    for part in optimizer.parts if isinstance(optimizer, Several) else (optimizer,):
        if type(part) not in _FUSED:
            continue
        for group in part.param_groups:
            is_chosen = any(group.get(choice) is not None for choice in ("fused", "foreach"))
            is_plain = not (group.get("capturable") or group.get("differentiable"))
            if not is_chosen and is_plain and all(p.is_floating_point() for p in group["params"]):
                group["fused"] = True
                # What the optimizer sets when it is made with `fused=True`.
                part._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def check_schedulers(given: Any, optimizer: Any) -> tuple[Any, ...]:
    """Return the learning-rate schedulers that the engine steps, of one, several or None.

    `optimizer` is what the user gave as such. Raises ModelError for a scheduler of another
    optimizer, and for one whose step needs to be told something.
    """
    if given is None:
        return ()
    schedulers = tuple(given) if isinstance(given, list | tuple) else (given,)
    own = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    for scheduler in schedulers:
        name = type(scheduler).__name__
        step = getattr(scheduler, "step", None)
        if not callable(step):
            raise ModelError(
                f"scheduler= has a {name}, which has no step(); give a torch scheduler"
            )
        needed = [
            p.name
            for p in inspect.signature(step).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise ModelError(
                f"{name}.step needs {', '.join(needed)}, which the engine does not have; leave "
                "scheduler= out and call it after engine.step"
            )
        if not any(getattr(scheduler, "optimizer", None) is each for each in own):
            raise ModelError(
                f"scheduler= has a {name} of another optimizer than optimizer=; give both, the "
                "scheduler made from that optimizer"
            )
    return schedulers


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
    if isinstance(made, list | tuple):
        made = Several(made)
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
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ModelError("the optimizer has stepped already; apply the plan before training")
    names = {id(p): fqn for fqn, p in module.named_parameters()}
    _refuse_references(optimizer, names)
    for group in optimizer.param_groups:
        stand_ins = []
        for param in group["params"]:
            if id(param) not in names:
                raise ModelError(
                    "the optimizer has parameters that are not the model's; "
                    "make it from model.parameters() of the model given to apply"
                )
            copies = [p for p in held.get(names[id(param)], ()) if p.requires_grad]
            stand_ins += [(names[id(param)], copy) for copy in copies]
            _move_state(optimizer, param, copies)
        # In place: schedulers and the script hold these very groups.
        group["params"] = [copy for _, copy in stand_ins]
        if "param_names" in group:
            group["param_names"] = [fqn for fqn, _ in stand_ins]


def _refuse_references(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse an optimizer with the model's parameters, or their ids, beside its param groups."""
    known = {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
    known |= {id(part) for group in optimizer.param_groups for part in (group, group["params"])}
    found = next(_references(vars(optimizer), names, known, _DEPTH), None)
    if found is not None:
        name = type(optimizer).__name__
        raise ModelError(
            f"{name} has {found} beside its param groups, where the engine can't put what it "
            f"trains in its place; give a function: optimizer=lambda params: {name}(params, ...)"
        )


_DEPTH = 4
"""So far into containers and optimizers, parameters are looked for."""


def _references(value: Any, names: Mapping[int, str], known: set[int], depth: int) -> Iterator[str]:
    """Yield what stands for a parameter of the model inside of an attribute of an optimizer."""
    if isinstance(value, Tensor) and id(value) in names:
        yield f"the parameter {names[id(value)]}"
    elif type(value) is int and value in names:
        yield f"id() of the parameter {names[value]}"
    if not depth or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, torch.optim.Optimizer):
        value = vars(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _references(item, names, known, depth - 1)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a step was counted; some optimizers (Adagrad) make their state when they are made."""
    count = state.get("step", 0)
    return bool(count != 0) if isinstance(count, (int, float, Tensor)) else True


def _move_state(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, copies: Sequence[nn.Parameter]
) -> None:
    state = optimizer.state.pop(param, None)
    if not state:
        return
    name = type(optimizer).__name__
    for copy in copies:
        try:
            optimizer.state[copy] = fresh_state(state, param, copy)
        except ValueError as error:
            raise ModelError(
                f"{name} has state before planner.apply whose {error}; apply the plan before "
                f"training, or give a function: optimizer=lambda params: {name}(params, ...)"
            ) from None


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"{name} evaluates the model several times in a step, which the "
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
            f"{name} has a hook on its step, which would see only this rank's "
            "pieces of parameters and gradients; clip with planner.apply(max_grad_norm=...), and "
            "do the rest after engine.step"
        )
