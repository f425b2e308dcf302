"""The host's side of a fake CUDA: what it reads of tensors without values, and what it waits for.

A host waits for a device where it reads a value (`item`, `float`, `bool`, `tolist`), where it
copies from or to memory that is not pinned, or in a blocking way, and where it says so
(`synchronize`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from tests.fake_cuda import device

_ROOT = Path(planner.__file__).parent
_aten = torch.ops.aten
_READS = {_aten.nonzero.default, _aten.equal.default, _aten._unique2.default}
"""Ops that need values to make a result (beside `_local_scalar_dense`, which all reads become)."""


class Host(TorchDispatchMode):
    """Inside, every value that the host reads is one. Mutable: `waits` counts by place and kind
    inside `counting`, and it remembers what memory is pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._counts = False
        self._pinned: dict[int, StorageWeakRef] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count waits inside, from none on."""
        self.waits.clear()
        self._counts = True
        device.waited.append(self._wait)
        try:
            yield
        finally:
            self._counts = False
            device.waited.remove(self._wait)

    def _wait(self, what: str) -> None:
        if self._counts:
            self.waits[f"{_place()}: {what}"] += 1

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory was made pinned."""
        known = self._pinned.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return known is not None and not known.expired()

    def _pin(self, tensor: Tensor) -> Tensor:
        known = StorageWeakRef(tensor.untyped_storage())
        self._pinned[known.cdata] = known
        return tensor

    def _copy(self, source: Tensor, target: torch.device, pinned: bool, blocks: bool) -> None:
        """Take in a copy; `pinned` is of the side that lies on the host."""
        if source.device.type == target.type:
            return
        if not pinned:
            self._wait(f"pageable copy from {source.device.type}")
        elif blocks:
            self._wait(f"blocking copy from {source.device.type}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is _aten._pin_memory.default:
            return self._pin(_aten.empty_like.default(args[0]))
        if func is _aten._local_scalar_dense.default:
            return self._read(func, args[0])
        if func in _READS and args[0].device.type != "cpu":
            self._wait(func._schema.name.removeprefix("aten::"))
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            source, to, blocks = args[0], kwargs["device"], not kwargs.get("non_blocking")
            # (What comes down without blocking, PyTorch puts in pinned memory.)
            pinned = self.is_pinned(source) if source.device.type == "cpu" else not blocks
            self._copy(source, to, pinned, blocks)
        if func is _aten.copy_.default:
            target, source, *rest = args
            on_host = source if source.device.type == "cpu" else target
            blocks = not (rest[0] if rest else kwargs.get("non_blocking"))
            self._copy(source, target.device, self.is_pinned(on_host), blocks)
        made = func(*args, **kwargs)
        return self._pin(made) if kwargs.get("pin_memory") else made

    def _read(self, func: Any, tensor: Tensor) -> Any:
        if tensor.device.type != "cpu":
            self._wait("read of a value")
        else:
            try:
                return func(tensor)  # a constant
            except DataDependentOutputException:
                pass
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1


def _place() -> str:
    """The innermost function of planner that runs, as `file:function`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT):
            return f"{path.relative_to(_ROOT)}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside"
