"""A ledger of live bytes: storages counted as ops make them and as their last tensor dies.

`dryrun` runs the engine under a `Ledger`, on fake tensors or on real ones. In: the ops that run.
Out: a `MemorySample` for each job. Bytes that the plan puts on the host are counted apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """A job, or another part of a step, with the live bytes at its end and at its height."""

    kind: str
    """F, B, ... for jobs; the recorder's span kind for other parts."""
    name: str
    """The span's name."""
    end_bytes: int
    """Live on the device at its end."""
    peak_bytes: int
    """Live on the device at its height."""
    host_bytes: int
    """Live on the host at the height of that."""


class Ledger(TorchDispatchMode):
    """Counts bytes of live storages as ops make them, and plays the engine's recorder.

    `live_bytes` are the device's, `host_bytes` the host's. Mutable: it is a running tally. A
    storage is found when an op returns a tensor in it, changes when FSDP2 resizes it, and
    leaves when the last tensor in it dies. `is_dry`: tensors have no values. `copies_to_reduce`:
    a reduce-scatter is counted with the copy of its message that it would make.
    """

    def __init__(self, *, is_dry: bool, copies_to_reduce: bool) -> None:
        super().__init__()
        self._is_dry, self._copies_to_reduce = is_dry, copies_to_reduce
        self.live_bytes = self.host_bytes = 0
        self.samples: list[MemorySample] = []
        self._peak_bytes = self._host_peak_bytes = 0
        self._is_host = False
        self._on_host: set[int] = set()
        self._bytes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd works in place here while no mode watches. Without this the ledger itself would
        # raise the height by a gradient.
        if func is torch.ops.aten.add.Tensor and not kwargs and _is_accumulation(*args):
            func = torch.ops.aten.add_.Tensor
        if func is torch.ops.aten.index_put.default and _is_backward_of_index():
            func = torch.ops.aten.index_put_.default
        if self._is_dry and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as it is for real: on fake tensors the op would return a copy
        made = func(*args, **(kwargs or {}))
        if self._copies_to_reduce and func is torch.ops.c10d._reduce_scatter_base_.default:
            # (gloo copies the message it reduces, and frees the copy inside of the op.)
            message = args[1].untyped_storage().nbytes()
            self._peak_bytes = max(self._peak_bytes, self.live_bytes + message)
        for leaf in torch.utils._pytree.tree_leaves(made):
            # (A sparse tensor has tensors of numbers and values, which other ops made.)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                # A DTensor is a shell of the whole's size around its local tensor.
                held = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                if held.device.type != "meta":  # which takes no memory
                    self._see(held.untyped_storage())
        return made

    @property
    def peak_bytes(self) -> int:
        """The most that was live on the device since the last sample, or since `clear`."""
        return self._peak_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside, storages resized in place included: resizing is not an op."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._bytes:
                self._count(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextmanager
    def span(
        self,
        kind: str,
        name: str,
        stage: int = -1,
        microbatch: int = -1,
        *,
        on_host: bool = False,
        lane: str = "",
    ) -> Iterator[None]:
        """Note what happens inside as a sample, with what happened since the last; waits
        inside a job are part of it.
        """
        if kind == "WAIT":
            yield
            return
        yield
        self.samples.append(
            MemorySample(
                kind=kind,
                name=name,
                end_bytes=self.live_bytes,
                peak_bytes=self._peak_bytes,
                host_bytes=self._host_peak_bytes,
            )
        )
        self._peak_bytes, self._host_peak_bytes = self.live_bytes, self.host_bytes

    @contextmanager
    def counting_as_host(self) -> Iterator[None]:
        """Count storages made inside as the host's."""
        before, self._is_host = self._is_host, True
        try:
            yield
        finally:
            self._is_host = before

    def move_to_host(self, tensor: Tensor) -> None:
        """Count a tensor's storage as the host's from now on."""
        key = tensor.untyped_storage()._cdata
        num_bytes = self._bytes.get(key, 0)
        if num_bytes and key not in self._on_host:
            self._count(key, 0)
            self._on_host.add(key)
            self._count(key, num_bytes)

    def end_step(self) -> None:
        """Nothing: samples are read when both steps are over."""

    def clear(self) -> None:
        """Begin anew, with what is alive."""
        self.samples.clear()
        self._peak_bytes, self._host_peak_bytes = self.live_bytes, self.host_bytes

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            return

        def gone(_: Any) -> None:
            self._count(key, 0)
            del self._bytes[key], self._alive[key]
            self._on_host.discard(key)

        self._bytes[key] = 0
        if self._is_host:
            self._on_host.add(key)
        # A storage dies with its last tensor: its bytes are subtracted then.
        self._alive[key] = weakref.ref(storage, gone)
        self._count(key, storage.nbytes())

    def _count(self, key: int, num_bytes: int) -> None:
        more = num_bytes - self._bytes[key]
        self._bytes[key] = num_bytes
        if key in self._on_host:
            self.host_bytes += more
            self._host_peak_bytes = max(self._host_peak_bytes, self.host_bytes)
        else:
            self.live_bytes += more
            self._peak_bytes = max(self._peak_bytes, self.live_bytes)


_ONLY_USERS = 4, 2
"""References to a gradient, and to its storage, that nobody but autograd's engine and this
mode hold: the engine's own, those of the call, and Python's."""


def _is_backward_of_index() -> bool:
    """Whether an index's backward runs: it puts into zeros of its own, in place unless a mode
    watches (`index_backward` in PyTorch's FunctionsManual.cpp).
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "IndexBackward0"


def _is_accumulation(total: Any, grad: Any) -> bool:
    """Whether autograd's engine adds a second gradient to one that nobody else has.

    It does so in place, except where a mode watches: then it makes a third.
    """
    return (
        torch._C._current_autograd_node() is not None
        and not torch.is_grad_enabled()
        and isinstance(total, Tensor)
        and isinstance(grad, Tensor)
        and total.shape == grad.shape
        and total.dtype == grad.dtype
        and torch.ops.aten.is_non_overlapping_and_dense(total)
        and total._use_count() == _ONLY_USERS[0]  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(total.untyped_storage()._cdata) == _ONLY_USERS[1]
    )
