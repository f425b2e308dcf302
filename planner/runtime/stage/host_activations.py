"""Activations that wait on the host between their forward and their backward.

Inside a forward, autograd gives what it saves to `Parcel`, which notes each storage once.
While the next job runs, the storages are copied to the host and then let go; while the job
before the backward runs, they are copied back (`planner.language.schedule.timing.offloads` says
which and when). What the stage holds anyway is not moved: parameters, buffers, and what comes with
the batch. Anything else that still refers to a storage, such as a message on its way, keeps
it alive as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from planner.language.schedule.jobs import Job
from planner.language.schedule.timing.offloads import Offload, offloads_of
from planner.runtime.stage.host import Host, Ticket


class ActivationsOnHost:
    """The activations of one rank's microbatches that are offloaded. Mutable: those that are now.

    `current` is the parcel that the forward under way packs into.
    """

    def __init__(self, host: Host, row: Sequence[Job], stages: Iterable[int]) -> None:
        """`stages` are those of the rank that offload theirs, `row` its jobs."""
        self.current: Parcel | None = None
        self._host = host
        self._parcels: dict[Offload, Parcel] = {}
        found = offloads_of(row, frozenset(stages))
        self._offloads = {
            (offload.stage_index, offload.microbatch_index): offload for offload in found
        }
        self._at: dict[str, dict[int, list[Offload]]] = {}
        for moment in ("forward", "leaving", "arriving", "backward"):
            self._at[moment] = {}
            for offload in found:
                self._at[moment].setdefault(getattr(offload, moment), []).append(offload)

    def travels(self, job: Job) -> bool:
        """Whether what this forward saves is offloaded."""
        return (job.stage_index, job.microbatch_index) in self._offloads

    @contextmanager
    def packing(self, job: Job, held: Iterable[Tensor]) -> Iterator[None]:
        """Take what autograd saves inside; `held` is not to be moved."""
        offload = self._offloads[job.stage_index, job.microbatch_index]
        parcel = self._parcels[offload] = self.current = Parcel(self._host, str(job))
        parcel.hold(held)
        try:
            with saved_tensors_hooks(parcel.pack, parcel.unpack):
                yield
        finally:
            self.current = None

    def hold(self, tensors: Iterable[Tensor | None]) -> None:
        """Leave the storages of these tensors where they are, if a forward packs."""
        if self.current is not None:
            self.current.hold(tensors)

    def before(self, position: int) -> None:
        """Do what comes before the job at a position: arrivals, and the next ones' departure."""
        # What was prefetched beside the job before is used by this job; what the next backward
        # needs begins to come back beside this job.
        for offload in self._at["backward"].get(position, ()):
            self._parcels.pop(offload).arrive()
        for offload in self._at["arriving"].get(position, ()):
            self._parcels[offload].fetch()

    def after(self, position: int) -> None:
        """Do what comes after the job at a position."""
        # The copy to the host ran beside the job that has ended, so the device's memory can go;
        # what the forward that has ended saved begins to leave beside the next job.
        for offload in self._at["leaving"].get(position, ()):
            self._parcels[offload].let_go()
        for offload in self._at["forward"].get(position, ()):
            self._parcels[offload].leave()


class _Load:
    """One storage that autograd saved. Mutable: it is on the device, on the host, or both.

    Both are flat, in the dtype of the first tensor saved of it. `uses` counts the saved
    tensors that were not unpacked yet; with the last of them the device's memory is let go.
    """

    __slots__ = ("on_device", "on_host", "uses")

    def __init__(self, on_device: Tensor) -> None:
        self.on_device: Tensor | None = on_device
        self.on_host: Tensor | None = None
        self.uses = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved: a view of a storage."""

    load: _Load
    """The storage."""
    dtype: torch.dtype
    """That of the view, which may differ from the storage's first."""
    size: torch.Size
    """Sizes of its dims."""
    stride: tuple[int, ...]
    """Steps in elements of `dtype`."""
    offset: int
    """First element in the storage, in elements of `dtype`."""
    is_conjugate: bool
    """Reading it conjugates what lies in memory: `x.conj()` copies nothing."""
    is_negative: bool
    """Reading it negates what lies in memory, as of the imaginary part of a conjugate."""


class Parcel:
    """What autograd saved in one forward, by storage. Mutable."""

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self._held: set[int] = set()
        self._loads: dict[int, _Load] = {}
        self._ticket: Ticket | None = None

    def hold(self, tensors: Iterable[Tensor | None]) -> None:
        """Leave the storages of these tensors where they are."""
        for tensor in tensors:
            if tensor is not None and not isinstance(tensor, DTensor):
                self._held.add(tensor.untyped_storage()._cdata)

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """Note a tensor that autograd saves."""
        if isinstance(tensor, DTensor):
            return tensor
        # (An address stays its own: the storages of parameters, buffers and the batch outlive the
        # forward.)
        key = tensor.untyped_storage()._cdata
        if key in self._held:
            return tensor
        # Saved tensors are often views of one storage, which is copied once.
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _Load(_whole_storage(tensor))
        load.uses += 1
        return Saved(
            load,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        """Give autograd a tensor back."""
        if isinstance(saved, Tensor):
            return saved
        load = saved.load
        flat = load.on_device
        assert flat is not None, f"activations of {self._name} are asked for while on the host"
        # The last view to be unpacked lets the memory go, as autograd frees what it saved node by
        # node.
        load.uses -= 1
        if not load.uses:
            load.on_device = None
        view = flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        view = view.conj() if saved.is_conjugate else view
        return torch._neg_view(view) if saved.is_negative else view

    def leave(self) -> None:
        """Begin to copy everything to the host."""
        pairs = []
        for load in self._loads.values():
            assert load.on_device is not None
            # Pinned, so that the copy runs on a stream of its own beside the next job.
            load.on_host = self._host.empty(
                load.on_device.shape, load.on_device.dtype, is_copied=True
            )
            pairs.append((load.on_device, load.on_host))
        self._ticket = self._host.down(pairs, f"activations {self._name}")

    def let_go(self) -> None:
        """Let the device's memory go, which is reused only after the copies are done."""
        self._wait()
        for load in self._loads.values():
            load.on_device = None

    def fetch(self) -> None:
        """Begin to copy everything back."""
        pairs = []
        for load in self._loads.values():
            assert load.on_host is not None
            load.on_device = torch.empty_like(load.on_host, device=self._host.device)
            pairs.append((load.on_host, load.on_device))
        self._ticket = self._host.up(pairs, f"activations {self._name}")

    def arrive(self) -> None:
        """Let what the device does from now on use what came back."""
        self._wait()
        for load in self._loads.values():
            load.on_host = None
        self._loads.clear()  # From here on autograd alone holds them.

    def _wait(self) -> None:
        assert self._ticket is not None
        self._ticket.hold_device()
        self._ticket = None


def _whole_storage(tensor: Tensor) -> Tensor:
    """All of a tensor's storage as it lies in memory, flat, in its dtype."""
    tensor = tensor.detach()
    # Both take back what is only marked: other tensors of the storage may be without the mark.
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    # The whole storage, gaps and parts that no saved tensor shows included: views need their own
    # offsets.
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


class Incoming:
    """Where the gradient of a stage's input is left, without holding the input itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._empty = tensor.new_empty(0)
        self._shape = tensor.shape
        self.grad: Tensor | None = None

    def entering(self, tensor: Tensor) -> Tensor:
        """Return the input as autograd is to see it."""
        entered: Tensor = _Enter.apply(self._empty.requires_grad_(), tensor, self)
        return entered

    def zeros(self) -> Tensor:
        """Return a gradient of zeros."""
        return self._empty.detach().new_zeros(self._shape)


class _Enter(torch.autograd.Function):
    """The identity, whose backward leaves the gradient with `Incoming`: a leaf would be held by
    the graph until its backward, and its memory with it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, incoming: Incoming) -> Tensor:
        ctx.incoming = incoming
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.incoming.grad = grad
        return None, None, None
