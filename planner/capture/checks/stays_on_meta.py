"""What forward makes lies on the meta device, like the model, and keeps the values it was given.

A model is captured on meta tensors. A forward written for one device makes tensors of its own
there, often without naming it (`torch.arange(n)`), and some from Python's numbers
(`torch.tensor([1.0, 2.0])`, `x[:, [0, 2]]`): on meta those would lose their values.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.capture.checks.constants import Constants
from planner.capture.checks.guards import value_that_passes
from planner.capture.checks.hooks import HOOK_ADVICE
from planner.capture.diagnose import calling_line
from planner.capture.inner_gradients import inner_gradient
from planner.errors import CaptureError

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_MOVES = (torch.Tensor.cpu, torch.Tensor.cuda)
_HOOKING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_TRUTHS = (torch.Tensor.__bool__, torch.Tensor.item)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_CHANGED = _device_constructors().union(
    (*_FROM_DATA, *_MOVES, *_HOOKING, *_TRUTHS, *_INDEXING),
    (torch.Tensor.backward, torch.Tensor.to, torch.autograd.grad, _DATA),
)
"""Functions that `OnMeta` does not call as they are."""

_CASTING = ("cpu", "cuda")
"""Devices that a forward may name to autocast."""


class StaysOnMeta(TorchFunctionMode):
    """Lets a model that is built on the meta device move to another (``.to("cuda")``) in name."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; a meta tensor stays where it is."""
        kwargs = dict(kwargs or {})
        if func in _MOVES and args[0].is_meta:
            return args[0]
        if func is torch.Tensor.to and args[0].is_meta:
            args, kwargs = _to_meta(args, kwargs)
        return func(*args, **kwargs)


def _to_meta(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``Tensor.to`` with a device, where they name one, that is meta."""
    args = tuple("meta" if isinstance(a, str | torch.device) else a for a in args)
    return args, kwargs | ({"device": "meta"} if "device" in kwargs else {})


class OnMeta(TorchFunctionMode):
    """Runs forward on meta tensors; `values_of` gives what a constant made meanwhile holds."""

    def __init__(self) -> None:
        super().__init__()
        # By identity, which torch.export keeps; the tensor is held so that its id stays its own.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._constants = Constants()
        self.autocasts = False
        """Whether the call that runs is under autocast, which leaves meta tensors alone."""

    def values_of(self, constant: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor made under this mode from data, on the CPU."""
        known = self._known.get(id(constant))
        return known[1] if known else None

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether anything is known of a tensor's values."""
        return id(tensor) in self._known or self._constants.has_values(tensor)

    def told(self, constant: torch.Tensor) -> tuple[tuple[int, ...], str, str]:
        """Return what is known of a tensor that no op made: shape, dtype, and values if any."""
        values = self.values_of(constant)
        with _disable_current_modes():
            held = "" if values is None else repr(values.tolist())
        return tuple(constant.shape), str(constant.dtype), held

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, on meta where it makes a tensor."""
        kwargs = dict(kwargs or {})
        # (Below a dispatch mode autocast is off.)
        self.autocasts = any(map(torch.is_autocast_enabled, _CASTING))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CaptureError(
                f"forward uses a transform of torch.func (vmap, grad, jvp, ...){calling_line()}, "
                "which can't be planned; write it with plain tensor operations, or use "
                "torch.autograd.grad"
            )
        if func in _TRUTHS:
            value = self._constants.value_of(args[0])
            if value is None:
                value = value_that_passes(sys._getframe(1))
            if value is not None:
                return bool(value) if func is torch.Tensor.__bool__ else value
        made = self._call(func, args, kwargs) if func in _CHANGED else func(*args, **kwargs)
        self._constants.note(func, args, kwargs, made)
        return made

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _HOOKING:
            raise CaptureError(f"forward sets a hook on a gradient{calling_line()}; {HOOK_ADVICE}")
        if func is torch.Tensor.backward:
            raise CaptureError(
                f"forward calls backward(){calling_line()}; return the loss, whose backward a plan "
                "runs itself, or use torch.autograd.grad"
            )
        if func is torch.autograd.grad:
            found = inner_gradient(*args, **kwargs)
            if found is not None:
                return found
            found = func(*args, **kwargs)
            if kwargs.get("create_graph"):
                return found
            return tuple(None if grad is None else grad.detach() for grad in found)
        if func == _DATA:
            return args[0].detach()
        if func in _FROM_DATA:
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args[-1:])):
                return self._constant(func, args, kwargs)
            kwargs["device"] = "meta"
        elif func in _device_constructors():
            kwargs["device"] = "meta"
        elif func in _MOVES:
            return args[0]
        elif func is torch.Tensor.to:
            args, kwargs = _to_meta(args, kwargs)
        elif func in _INDEXING:
            args = (args[0], self._index(args[1]), *args[2:])
        return func(*args, **kwargs)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if func is torch.Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype} | kwargs
            func, args = torch.tensor, args[1:]
        with _disable_current_modes():
            values = func(*args, **kwargs | {"device": "cpu"})
            constant = torch.empty_like(values, device="meta")
        self._known[id(constant)] = (constant, values)
        return constant

    def _index(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(self._index(part) for part in index)
        if isinstance(index, list) and index and all(type(i) in (int, bool) for i in index):
            index = np.array(index)
        if not isinstance(index, np.ndarray) or index.ndim == 0:
            return index
        if index.dtype == bool and index.ndim == 1:  # a mask on meta has no known count
            (index,) = index.nonzero()
        return self._constant(torch.as_tensor, (index,), {})
