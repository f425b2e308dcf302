"""The user's module after `planner.apply`: what is done to it then reaches no rank's stages.

The engine holds copies of the weights, and programs that were captured before. Freezing a
parameter, setting a hook, another number in an attribute (a temperature that the script lowers), a
new layer or evaluation mode afterwards would change the plain script's training, and not the
engine's. Such a change is refused at the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, MutableSequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from planner.capture.checks.hooks import tensor_hooks
from planner.errors import PlanError

_DEPTH, _LENGTH = 4, 1_000
"""So far into objects, and into containers of so many items, numbers are looked for."""

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class Untouched:
    """Compares a module, and the function of its loss, with what they were when this was made.

    Immutable but for these.
    """

    def __init__(self, module: nn.Module, loss: Any = None) -> None:
        self._module = module
        self._parts = [(name, part, _of_part(part)) for name, part in module.named_modules()]
        self._params = [
            (name, param, _of_param(param)) for name, param in module.named_parameters()
        ]
        self._held = [
            (f"{name}.{key}" if name else key, held, key, value)
            for name, part in module.named_modules()
            for held in (part._modules, part._parameters, part._buffers)
            for key, value in held.items()
        ]
        self._numbers = [*_numbers_of_module(module), *_numbers_of_loss(loss)]

    def check(self) -> None:
        """Raise PlanError, naming what changed, when the module is not what it was."""
        for name, held, key, value in self._held:
            if held.get(key) is not value:
                raise PlanError(
                    f"{name} is another object than when the plan was applied; the engine trains "
                    "what was captured then: put parts and weights in place before planner.apply "
                    "(other weights of the same model: engine.load_weights)"
                )
        for name, param, before in self._params:
            if _of_param(param) != before:
                self._refuse(f"parameter {name}", _PARAM, before, _of_param(param))
        for name, part, before in self._parts:
            if _of_part(part) != before:
                self._refuse(f"module {name or 'model'}", _PART, before, _of_part(part))
        for name, items, key, number in self._numbers:
            try:
                now = items[key]
            except LookupError:
                continue
            # (A NaN is no other number than itself.)
            if now is not number and now != number and (now == now or number == number):
                raise PlanError(
                    f"{name} was {number!r} when the plan was applied and is {now!r}; the engine "
                    "trains what was captured then: pass what changes from step to step with the "
                    "batch, as a tensor"
                )

    @staticmethod
    def _refuse(
        what: str, fields: tuple[str, ...], before: tuple[Any, ...], now: tuple[Any, ...]
    ) -> None:
        field, old, new = next(
            (field, old, new)
            for field, old, new in zip(fields, before, now, strict=True)
            if old != new
        )
        remedy = "make such changes before planner.apply"
        if field == _PARAM[0]:
            # What trains decides memory, exchange and backwards: it is another plan's.
            remedy = "engine.save, search a plan for the model frozen so, and engine.load under it"
        raise PlanError(
            f"{field} of {what} was {old} when the plan was applied and is {new}; the engine "
            f"trains what was captured then: {remedy}"
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


# -- numbers ------------------------------------------------------------------------------

_Number = tuple[str, Any, Any, bool | int | float]
"""A number by its path, what holds it, and its key there."""

_OPAQUE = Tensor | nn.Module | type | ModuleType | FunctionType | MethodType


def _numbers_of_module(module: nn.Module) -> Iterator[_Number]:
    seen: set[int] = set()
    for name, part in module.named_modules():
        own = vars(part)
        for key in own.keys() - _STANDARD:
            yield from _numbers(f"{name}.{key}" if name else key, own, key, seen, _DEPTH)


def _numbers_of_loss(loss: Any) -> Iterator[_Number]:
    """Yield the numbers that a function of the loss reads: of the object it is a method of, of
    what is around it, and of its module.
    """
    seen: set[int] = set()
    if isinstance(loss, MethodType):
        loss = loss.__self__
    if isinstance(loss, nn.Module):
        yield from _numbers_of_module(loss)
    elif isinstance(loss, FunctionType):
        for key in _globals_read(loss.__code__):
            if key in loss.__globals__:
                yield from _numbers(key, loss.__globals__, key, seen, _DEPTH)
        for key, cell in zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True):
            yield from _numbers(key, _Cell(cell), 0, seen, _DEPTH)
    elif hasattr(loss, "__dict__"):
        for key in vars(loss):
            yield from _numbers(f"loss.{key}", vars(loss), key, seen, _DEPTH)


def _globals_read(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_globals_read, inner))


class _Cell:
    """A variable of the function around another, as something with an item."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, key: int) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not set
            raise LookupError from None


def _numbers(path: str, items: Any, key: Any, seen: set[int], depth: int) -> Iterator[_Number]:
    """Yield the numbers in an item of a container or object, and in what that holds."""
    try:
        value = items[key]
    except LookupError:
        return
    if isinstance(value, bool | int | float):
        yield path, items, key, value
        return
    if isinstance(value, _OPAQUE) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    inner: Any
    if isinstance(value, MutableMapping | MutableSequence):
        inner = value
    elif type(value).__dictoffset__ and not callable(value):
        inner = vars(value)
    else:
        return
    if len(inner) > _LENGTH:
        return
    keys = list(inner) if isinstance(inner, MutableMapping) else range(len(inner))
    for each in keys:
        yield from _numbers(f"{path}.{each}", inner, each, seen, depth - 1)
