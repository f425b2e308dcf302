"""Copies in host memory of what is to be written, made beside the next forward and backward.

Weights and optimizer state change only when the optimizer steps. So a save returns at once, and
the copies have the time until then:

    save | forward and backward of the next step          | optimizer steps
         | device to host on a stream, host to host in a thread | hold()
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from planner.runtime.process import device as devices

SLAB_BYTES = 2**28
"""Of pinned memory, in one piece: PyTorch rounds such pieces up to powers of two."""

_ALIGNMENT = 64
"""Of a copy in a slab, in bytes: a cache line, and a multiple of any element."""


class Staging:
    """Host memory that is used again from save to save. Mutable."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, devices.is_accelerator(device)
        self._slabs: list[Tensor] = []
        self._stream = devices.of(device).Stream(device) if self._on_gpu else None

    def begin(self, sources: Sequence[Tensor]) -> Copies:
        """Begin to copy tensors; the copies before are no longer used."""
        targets = self._places(sources)
        pairs = list(zip(sources, targets, strict=True))
        # Copies from host to host would block the save; the thread that writes makes them.
        later = [pair for pair in pairs if pair[0].device.type == "cpu"]
        event = None
        if self._stream is not None:
            module = devices.of(self._device)
            # The step's last kernels still write what is copied.
            self._stream.wait_stream(module.current_stream(self._device))
            with module.stream(self._stream), torch.no_grad():
                for source, target in pairs:
                    if source.device.type != "cpu":
                        target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return Copies(targets, sources, later, event, self._device)

    def _places(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Deal slabs of host memory to tensors, in order."""
        slab, filled = 0, 0
        places = []
        for source in sources:
            size = prod(source.shape) * source.element_size()
            if slab < len(self._slabs) and filled + size > self._slabs[slab].numel():
                slab, filled = slab + 1, 0
            # The next save deals the same tensors in the same order, and finds slabs that are large
            # enough.
            while slab < len(self._slabs) and size > self._slabs[slab].numel():
                slab += 1
            if slab == len(self._slabs):
                shape = max(size, SLAB_BYTES)
                self._slabs.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self._on_gpu))
            place = self._slabs[slab][filled : filled + size]
            places.append(place.view(source.dtype).view(source.shape))
            filled += -(-size // _ALIGNMENT) * _ALIGNMENT
        return places


class Copies:
    """Copies under way. `tensors` are what they are of, in order, once `finish` has returned.

    The sources live until then: memory that the step's stream frees may be written by its next
    kernels, and another stream still reads it.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        sources: Sequence[Tensor],
        later: list[tuple[Tensor, Tensor]],
        event: torch.Event | None,
        device: torch.device,
    ) -> None:
        self.tensors = tensors
        self._sources: Sequence[Tensor] = sources
        self._later, self._event, self._device = later, event, device
        self._is_done = threading.Event()

    @torch.no_grad()
    def finish(self) -> None:
        """Copy what is on the host, wait for what comes from the device; beside the training."""
        try:
            for source, target in self._later:
                target.copy_(source)
        finally:
            self._later = []
            # Set before the device's copies are done: for these the device itself waits, in `hold`.
            self._is_done.set()
            if self._event is not None:
                self._event.synchronize()
            self._sources = ()

    def hold(self) -> None:
        """Let sources change only after their copies: waits here, or lets the device wait."""
        self._is_done.wait()
        if self._event is not None:
            devices.of(self._device).current_stream().wait_event(self._event)
