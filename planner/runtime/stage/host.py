"""Host memory beside a device: what is put there, and copies that go their own way.

On a GPU, memory that copies go to or come from can be pinned, and each direction has a
stream of its own, so both run beside what the device computes. On a CPU the two memories
are one; a thread for each direction copies, so the same code runs in the same order there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planner.runtime.process import device as devices
from planner.runtime.process.recorder import Recorder
from planner.timeline import COPY, UPDATE

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(from, to)."""


class Ticket(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Return when they are done: the host may use what they wrote or read."""

    def hold_device(self) -> None:
        """Let what the device is given from now on begin after they are done."""


@dataclass(frozen=True, slots=True)
class _OnStream:
    event: torch.Event
    device: torch.device

    def wait(self) -> None:
        self.event.synchronize()

    def hold_device(self) -> None:
        devices.of(self.device).current_stream().wait_event(self.event)


@dataclass(frozen=True, slots=True)
class _OnThread:
    copied: Future[None]

    def wait(self) -> None:
        self.copied.result()

    def hold_device(self) -> None:
        # (On a CPU the host is the device: to hold it is to wait.)
        self.copied.result()


class Host:
    """The host's side of one rank. `recorder`, if set, is told when copies ran."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recorder: Recorder | None = None
        self._on_gpu = devices.is_accelerator(device)
        self._streams: dict[str, torch.Stream] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, is_copied: bool = False) -> Tensor:
        """Return new memory on the host, pinned if it `is_copied` from or to a GPU.

        Pinned memory that is let go while a copy uses it is reused only after that: PyTorch's
        pinned allocator keeps events of the copies it was used in.
        """
        return torch.empty(shape, dtype=dtype, pin_memory=is_copied and self._on_gpu)

    def holding(self) -> AbstractContextManager[None]:
        """Inside, what is allocated is the host's: a ledger counts it so."""
        return nullcontext()

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Inside, the host computes on what it holds."""
        span = nullcontext() if self.recorder is None else self._span(UPDATE, name)
        with self.holding(), span:
            yield

    def _span(self, kind: str, name: str, *, on_host: bool = True) -> AbstractContextManager[None]:
        assert self.recorder is not None
        return self.recorder.span(kind, name, on_host=on_host)

    def down(self, pairs: Pairs, name: str) -> Ticket:
        """Begin copies from the device; the caller keeps their sources alive and unchanged
        until the device was held for them.
        """
        return self._begin(pairs, "down", name)

    def up(self, pairs: Pairs, name: str) -> Ticket:
        """Begin copies to the device, after what it was given so far."""
        return self._begin(pairs, "up", name)

    def _begin(self, pairs: Pairs, direction: str, name: str) -> Ticket:
        name = f"{direction} {name}"
        if self._on_gpu:
            return self._on_stream(pairs, direction, name)
        # A thread a direction: copies of a direction keep their order, and both directions run at
        # once.
        thread = self._threads.get(direction)
        if thread is None:
            thread = self._threads[direction] = ThreadPoolExecutor(1, f"copies-{direction}")
        return _OnThread(thread.submit(self._copy, pairs, name))

    def _on_stream(self, pairs: Pairs, direction: str, name: str) -> Ticket:
        module, stream = devices.of(self.device), self._streams.get(direction)
        if stream is None:
            stream = self._streams[direction] = module.Stream(self.device)
        # The device may still be writing what goes down, or reading what is overwritten by what
        # comes up.
        stream.wait_stream(module.current_stream(self.device))
        with module.stream(stream):
            self._copy(pairs, name)
            event = module.Event()
            event.record(stream)
        return _OnStream(event, self.device)

    @torch.no_grad()
    def _copy(self, pairs: Pairs, name: str) -> None:
        if self.recorder is None:
            _copy_all(pairs)
            return
        with self._span(COPY, name, on_host=False):
            _copy_all(pairs)


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
