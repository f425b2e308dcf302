"""How far an accelerator is in the jobs that the host has given it.

The host runs ahead of a device: when it is between two steps, the device may still wait for a
message of the first job. An event behind each message and each job says which of them the device
has passed; nobody waits for these events.

    host     F0 F1 B0 F2 B1 ... closes the step
    device   F0 .  waits for what F1 reads        <- the first event that has not happened
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from planner.language.schedule.jobs import Job
from planner.runtime.process import device as devices
from planner.runtime.step.messages.p2p import Message


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in what a device does: behind a job, or where it takes a message of it."""

    job: Job
    message: Message | None


class DeviceMarks:
    """The marks a device has not passed. Mutable: the training thread adds, the watchdog's takes
    away, and so does each step at its start.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = devices.of(device)
        self._ahead: deque[tuple[Mark, torch.Event]] = deque()
        self._unused: list[torch.Event] = []
        self._passed = 0
        # Both threads take marks away: the first, of which each has to be sure.
        self._lock = threading.Lock()

    def add(self, job: Job, message: Message | None = None) -> None:
        """Mark what the device was given last."""
        event = self._unused.pop() if self._unused else self._module.Event()
        event.record()
        self._ahead.append((Mark(job, message), event))

    def next(self) -> tuple[int, Mark | None]:
        """Return how many marks were passed so far, and the first that was not."""
        with self._lock:
            while self._ahead and self._ahead[0][1].query():
                self._unused.append(self._ahead.popleft()[1])
                self._passed += 1
            return self._passed, self._ahead[0][0] if self._ahead else None
