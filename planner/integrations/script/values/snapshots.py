"""Values of a state dict, which in one process are the parameters themselves.

Under a plan they are copies of what the engine had. What would tell the two apart is refused: a
write, which would reach the model, and a read after a later update, which would see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlanError

_WRITTEN = (
    "a value of model.state_dict() is written to, which is a copy: the engine has the parameters; "
    "change a clone of it, and bring all values by model.load_state_dict"
)
_LATE = (
    "a value of model.state_dict() is read after a later update, when it would be another in one "
    "process; take clones of the values that are kept, or the state dict anew"
)


class Snapshot(Tensor):
    """A parameter's values at an update; its views are snapshots, what is computed of it is not."""

    _updates: Callable[[], int]
    _taken_at: int

    @classmethod
    def of(cls, values: Tensor, updates: Callable[[], int]) -> Snapshot:
        """Return values as they are after as many updates as have been made."""
        found: Snapshot = values.as_subclass(cls)
        found._updates, found._taken_at = updates, updates()
        return found

    @property
    def plain(self) -> Tensor:
        """The values, which are still those of the model."""
        if self._updates() != self._taken_at:
            raise PlanError(_LATE)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _writes(func) and args and isinstance(args[0], Snapshot):
            raise PlanError(_WRITTEN)
        if any(isinstance(leaf, Snapshot) for leaf in _listed(kwargs.get("out"))):
            raise PlanError(_WRITTEN)
        if func in _OF_THE_OBJECT:  # (what is told of any tensor, whatever its values)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        source = next((arg for arg in args if isinstance(arg, Snapshot)), None)
        made = func(*map(_plain, args), **{name: _plain(each) for name, each in kwargs.items()})
        if isinstance(made, Tensor) and source is not None and _share(made, source):
            return Snapshot.of(made, source._updates)
        return made


_OF_THE_OBJECT = frozenset(
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.as_subclass,
    }
)


def _writes(func: Any) -> bool:
    """Whether a method changes the tensor that it is called on."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name in _IN_PLACE)
    return name.endswith("_")


_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "matmul",
    ]
)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _plain(value: Any) -> Any:
    if isinstance(value, Snapshot):
        return value.plain
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _share(made: Tensor, source: Snapshot) -> bool:
    """Whether two tensors have their values in one place."""
    with torch._C.DisableTorchFunctionSubclass():
        return made.numel() > 0 and (
            made.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        )
