"""Results of ops on meta tensors, computed once for equal calls.

Most meta kernels are Python: type promotion, broadcasting and strides of an addition take longer
than all else that a forward does for it. Equal layers make equal calls, so the layouts of a call's
results are kept, and tensors of these layouts are made for later calls.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout)) | {
    torch.memory_format
}

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Size, stride and dtype of a tensor at the beginning of its storage."""


class MetaResults(TorchDispatchMode):
    """Stands in for the kernels of ops; entered outside of all other dispatch modes.

    Mutable: grows with each call that is unlike those before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[Hashable, tuple[bool, tuple[Layout, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return new tensors like those that an equal call returned, or make the call."""
        kwargs = kwargs or {}
        told: list[Any] = [func, torch.get_default_dtype()]
        if not (_returns_new(func) and _tell(args, told) and _tell(tuple(kwargs.items()), told)):
            return func(*args, **kwargs)
        key = tuple(told)
        known = self._layouts.get(key)
        if known is None:
            made = func(*args, **kwargs)
            results = made if isinstance(made, tuple) else (made,)
            layouts = _layouts_of_new(results, tree_leaves((args, kwargs)))
            if layouts is not None:
                self._layouts[key] = isinstance(made, tuple), layouts
            return made
        returns_tuple, layouts = known
        new = tuple(
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype in layouts
        )
        return new if returns_tuple else new[0]


@functools.cache
def _returns_new(func: Any) -> bool:
    """Whether an op computes new tensors and does nothing beside. Of ATen alone that is sure."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    return all(each.alias_info is None for each in (*func._schema.arguments, *func._schema.returns))


def _tell(value: Any, told: list[Any]) -> bool:
    """Append what a kernel reads of an argument; False where it may read more."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if not value.is_meta or value.layout is not torch.strided or value.is_neg():
            return False
        told.append((value.shape, value.stride(), value.dtype))
        return not value.is_complex()  # which may be a conjugate in name
    if kind in _PLAIN:
        told.append(kind)
        told.append(value)
        return True
    if kind is tuple or kind is list:
        told.append(len(value))
        return all(_tell(each, told) for each in value)
    return False


def _layouts_of_new(results: tuple[Any, ...], given: list[Any]) -> tuple[Layout, ...] | None:
    """Return the layouts of results; None where they are no new meta tensors (`_unsafe_view`)."""
    storages = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
    layouts: list[Layout] = []
    for made in results:
        if type(made) is not Tensor or not _tell(made, []) or made.storage_offset():
            return None
        if made.untyped_storage()._cdata in storages:
            return None
        storages.add(made.untyped_storage()._cdata)
        layouts.append((made.shape, made.stride(), made.dtype))
    return tuple(layouts)
