"""The functions of torch that act on a taken model in another way, while a script runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.errors import PlanError
from planner.integrations.script.running import Running
from planner.integrations.script.values.pending import Pending
from planner.integrations.script.values.snapshots import Snapshot
from planner.runtime.state.users_module.away import is_gradient_away

_OF_AUTOGRAD = (
    "torch.autograd.grad of what the model returned, or for its parameters: gradients lie in the "
    "engine; let the model's forward return a loss that has what the gradients are for"
)
_BY_VALUE = (
    "clip_grad_value_ clips elements of gradients, which lie in the engine; use clip_grad_norm_"
)


@contextmanager
def replaced(running: Running) -> Iterator[None]:
    """Inside, a script's calls reach `running` where they concern its model."""
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        kept.append((owner, name, vars(owner)[name] if isinstance(owner, type) else
                     getattr(owner, name)))  # fmt: skip
        setattr(owner, name, make(getattr(owner, name)))

    put(nn.Module, "__call__", running.calls)
    put(nn.Module, "state_dict", lambda plain: _state_dict(running, plain))
    put(nn.Module, "load_state_dict", lambda plain: _load_state_dict(running, plain))
    put(nn.Module, "zero_grad", lambda plain: _zero_grad(running, plain))
    put(torch.optim.Optimizer, "__init__", lambda plain: _optimizer(running, plain))
    put(torch, "save", lambda plain: _save(running, plain))
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        put(owner, "clip_grad_norm_", lambda plain: _clip(running, plain))
        put(owner, "clip_grad_value_", lambda plain: _refused_on(running, plain, _BY_VALUE))
    put(torch.nn.utils, "get_total_norm", lambda plain: _norm(running, plain))
    put(torch.nn.utils, "clip_grads_with_norm_", lambda plain: _clip_by(running, plain))
    put(torch.autograd.Function, "apply", lambda plain: _function(plain))
    put(torch.autograd, "grad", lambda plain: _refused_on(running, plain, _OF_AUTOGRAD))
    put(torch.amp.GradScaler, "scale", lambda plain: _scale(running, plain))
    put(torch.distributed, "init_process_group", lambda plain: _own_processes(running, plain))
    put(torch.distributed, "is_initialized", lambda plain: _is_initialized(running, plain))
    try:
        yield
    finally:
        for owner, name, before in reversed(kept):
            setattr(owner, name, before)


def _state_dict(running: Running, plain: Any) -> Any:
    def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = running.name_of(module)
        if name is None or args or kwargs.get("destination") is not None:
            return plain(module, *args, **kwargs)
        prefix = kwargs.get("prefix", "")
        whole = running.loop.command("state")
        inner = f"{name}." if name else ""
        loop = running.loop
        return type(plain_state(plain, module))(
            (prefix + key[len(inner) :], Snapshot.of(value, lambda: loop.updates))
            for key, value in whole.items()
            if key.startswith(inner)
        )

    return state_dict


def plain_state(plain: Any, module: nn.Module) -> Any:
    """Return an empty state dict, of the class that modules have."""
    return plain(nn.Module())


def _load_state_dict(running: Running, plain: Any) -> Any:
    def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        name = running.name_of(module)
        if name is None:
            return plain(module, state_dict, *args, **kwargs)
        if name or not (args[0] if args else kwargs.get("strict", True)):
            raise PlanError(
                "load_state_dict of a part of the model, or with strict=False, in the midst of a "
                "training; load all of the model, or before the first step"
            )
        return running.load(state_dict)

    return load_state_dict


def _zero_grad(running: Running, plain: Any) -> Any:
    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        if running.is_model(module):
            running.loop.clear(set_to_none)
        else:
            plain(module, set_to_none)

    return zero_grad


def _optimizer(running: Running, plain: Any) -> Any:
    def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(optimizer, *args, **kwargs)
        running.finding.made(optimizer)
        if running.has_loop:
            running.loop.refuse_second(optimizer)

    return init


def _clip(running: Running, plain: Any) -> Any:
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if running.has_any(given):
            return running.loop.clip(given, max_norm, norm_type)
        return plain(given, max_norm, norm_type, *args, **kwargs)

    return clip_grad_norm_


def _norm(running: Running, plain: Any) -> Any:
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not any(map(is_gradient_away, given)):
            return plain(given, norm_type, *args, **kwargs)
        own = [p for p in running.loop.model.parameters() if p.requires_grad]
        return running.loop.clip(own[: len(given)], float("inf"), norm_type)

    return get_total_norm


def _clip_by(running: Running, plain: Any) -> Any:
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not running.has_any(given):
            plain(given, max_norm, total_norm, *args, **kwargs)
            return
        norm = running.loop.clip(given, max_norm, 2.0)
        if not torch.isclose(norm.double(), torch.as_tensor(total_norm).double(), rtol=1e-5):
            raise PlanError(
                f"clip_grads_with_norm_ is given a norm of {float(total_norm):g} and that of all "
                f"gradients is {float(norm):g}, by which the engine clips; use clip_grad_norm_"
            )

    return clip_grads_with_norm_


def _refused_on(running: Running, plain: Any, why: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        if running.has_any(tree_leaves((args, kwargs))):
            raise PlanError(why)
        return plain(*args, **kwargs)

    return refused


def _scale(running: Running, plain: Any) -> Any:
    def scale(scaler: Any, outputs: Any) -> Any:
        if scaler.is_enabled() and running.has_any(tree_leaves(outputs)):
            raise PlanError(
                "a GradScaler scales the loss, and a plan of `precision` fp16 has a scaler of its "
                "own; leave it out (enabled=False), and search with `precision` fp16"
            )
        return plain(scaler, outputs)

    return scale


def _function(plain: Any) -> Any:
    """Return what stands for ``torch.autograd.Function.apply``, whose forward alone would be noted
    of pending tensors, without its backward.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, Pending) for leaf in tree_leaves((args, kwargs))):
            raise PlanError(
                f"the script gives what the model returned to the autograd function "
                f"{cls.__qualname__}, whose backward would be lost; call it in the model's forward"
            )
        return plain.__func__(cls, *args, **kwargs)

    return classmethod(apply)


def _own_processes(running: Running, plain: Any) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if running.is_hidden:
            raise PlanError(
                "the script joins processes of its own (torch.distributed), and the plan's are for "
                "a script of one process; give the script as it is for one device, or use "
                "planner.apply"
            )
        return plain(*args, **kwargs)

    return init_process_group


def _is_initialized(running: Running, plain: Any) -> Any:
    # (A script that finds a group would exchange with ranks that run none of it.)
    return lambda: not running.is_hidden and plain()


def _save(running: Running, plain: Any) -> Any:
    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        with running.whole_models(obj):
            plain(obj, *args, **kwargs)

    return save
