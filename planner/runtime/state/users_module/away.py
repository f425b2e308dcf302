"""Tensors of the user's module after `planner.apply`, whose values lie in the engine.

They have shapes and dtypes, and no values. A script that reads or writes one would compute with
nothing (an average, a clip) or change nothing (weights loaded or clamped between steps), in
silence: tensors on the meta device take all of it. So whatever reaches one is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.errors import PlanError


def _data(tensor: Tensor) -> Tensor:
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _refuse_data(tensor: Tensor, value: Any) -> Never:
    raise PlanError(
        f"other values are put into {_name(tensor)}, which the engine has since planner.apply; "
        "engine.load_weights takes others, or change weights before planner.apply"
    )


class _Away(Tensor):
    """A buffer without values."""

    data = property(_data, _refuse_data)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        found = (t for t in tree_leaves((args, kwargs)) if isinstance(t, _Away | _AwayParameter))
        raise PlanError(
            f"{func.overloadpacket.__name__} needs the values of {_name(next(found))}, which the "
            "engine has since planner.apply: engine.full_state_dict() gives them, "
            "engine.load_weights takes others, engine.evaluate runs the model, "
            "engine.average_weights averages; change weights before planner.apply"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{_name(self)}: {self.dtype} {tuple(self.shape)}, its values are in the engine"


class _AwayParameter(nn.Parameter):
    """A parameter without values, and without a gradient."""

    data = property(_data, _refuse_data)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = _Away.__dict__["__torch_dispatch__"]
    __repr__ = _Away.__repr__  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:
        """None for `zero_grad` of a module, which a loop for one device may still call."""
        held: Callable[[], bool] | None = vars(self).get("planner_has_gradient")
        if held is not None:
            return gradient_away(self) if held() else None
        if sys._getframe(1).f_code is not nn.Module.zero_grad.__code__:
            self._refuse_gradient()
        return None

    @grad.setter
    def grad(self, value: Any) -> None:
        self._refuse_gradient()

    def _refuse_gradient(self) -> Never:
        raise PlanError(
            f"the gradient of {_name(self)} is in the engine since planner.apply, and engine.step "
            "makes the whole update; use planner.apply(..., max_grad_norm=) to clip, and "
            "engine.full_gradients() to look at what the last update took"
        )


def gradient_away(param: Tensor) -> Tensor:
    """Return what stands for the gradient of a parameter without values: there, and refused."""
    made: Any = Tensor._make_subclass(_Away, _empty(param))
    made.planner_name = f"the gradient of {_name(param)}"
    made.planner_gradient = True
    return made


def is_gradient_away(value: Any) -> bool:
    """Whether a value stands for a gradient that the engine has."""
    return isinstance(value, _Away) and hasattr(value, "planner_gradient")


def tell_gradients(module: nn.Module, held: Callable[[], bool]) -> None:
    """Let parameters without values have gradients without values, where `held` says so: for
    scripts that look whether there are any.
    """
    for param in module.parameters():
        if isinstance(param, _AwayParameter):
            vars(param)["planner_has_gradient"] = held


def _name(tensor: Any) -> str:
    return str(tensor.planner_name)


def take_away(module: nn.Module) -> None:
    """Leave a module without values; it refuses whatever reads or writes them.

    So do tensors of the module that the script holds elsewhere, as averages of weights do.
    """
    _replace(module, _away)
    module.register_load_state_dict_pre_hook(_refuse_load)


def refuse_away(module: nn.Module) -> None:
    """Raise PlanError for a model with tensors whose values an engine has already."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if isinstance(tensor, _Away | _AwayParameter):
            raise PlanError(
                f"{name} of the model is in an engine already ({_name(tensor)} of the model that "
                "it was made for), and engines share no tensors; give planner.apply a copy made "
                "before (copy.deepcopy), one model that has both losses, or, to train on, "
                "model.load_state_dict(engine.full_state_dict(), assign=True)"
            )


def _refuse_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    held = chain(module.parameters(), module.buffers())
    is_away = any(isinstance(tensor, _Away | _AwayParameter) for tensor in held)
    if is_away and not metadata.get("assign_to_params_buffers"):
        raise PlanError(
            "load_state_dict after planner.apply, since which the engine has the weights; load "
            "before planner.apply or by engine.load_weights, and with assign=True what the engine "
            "trained into the module"
        )


def _away(tensor: Tensor, name: str) -> Tensor:
    kind = _AwayParameter if isinstance(tensor, nn.Parameter) else _Away
    made = Tensor._make_subclass(kind, _empty(tensor), tensor.requires_grad)
    # Swapped in place: what else the script has of it (a list of weights, an average) is refused,
    # too.
    vars(made).update(vars(tensor), planner_name=name)
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError:  # something in PyTorch holds it: the module alone has the other
        return made
    return tensor


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def given_values(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a module that was left without values has these, by name; what is not among them
    stays without.
    """

    def made(tensor: Tensor, name: str) -> Tensor:
        if name not in values:
            return tensor
        value = values[name]
        is_param = isinstance(tensor, nn.Parameter)
        return nn.Parameter(value, tensor.requires_grad) if is_param else value

    before = _replace(module, made)
    try:
        yield
    finally:
        for held, key, tensor in before:
            held[key] = tensor


@contextmanager
def plain(module: nn.Module) -> Iterator[None]:
    """Inside, a module that was left without values has plain tensors on the meta device, so that
    it can be captured anew.
    """

    def made(tensor: Tensor, name: str) -> Tensor:
        like = _empty(tensor)
        return (
            nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
        )

    before = _replace(module, made)
    try:
        yield
    finally:
        for held, key, tensor in before:
            held[key] = tensor


def _replace(
    module: nn.Module, make: Callable[[Tensor, str], Tensor]
) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Put others in the place of a module's tensors, ties kept; return what was where."""
    before = []
    made: dict[int, Tensor] = {}
    for name, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                before.append((held, key, tensor))
                if id(tensor) not in made:
                    made[id(tensor)] = make(tensor, f"{name}.{key}" if name else key)
                held[key] = made[id(tensor)]
    return before
