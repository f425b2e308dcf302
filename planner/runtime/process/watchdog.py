"""Says what every rank is doing when nothing moves any more.

A thread on each rank notes every few seconds, in the store that the processes met at, which
job the rank is in and what it waits for, and counts there whether the rank has moved. A rank that
waits in its sum of gradients while another still computes is no stall: only when the count of all
ranks' moves stands still, the first rank to see it collects all notes and prints them once; then
every rank prints its Python stacks. Nothing is ended unless PLANNER_STALL_ENDS is set, as it is
where a run is kept: a slow disk may have stalled it, and the communication backend's own timeout
ends it. The stacks are those of all threads of a rank, by `faulthandler`.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from planner.runtime.process.failures import Failure, claim

STALL_S = "PLANNER_STALL_S"
"""Environment variable: seconds in one job that count as a stall; 0 turns the watchdog off."""

ENDS_S = "PLANNER_STALL_ENDS"
"""Environment variable: seconds after which a stall that was told ends the run; unset, never."""

_DEFAULT_STALL_S = 20.0
_STACKS = "stacks"
_TELLER = "teller"
_MOVES = "moves"

_started = itertools.count()
"""How many engines of this process were watched: the same number on all ranks for the same one."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank is doing: `progress` counts the jobs and phases begun; idle between steps.

    `waits` says that it can't go on before a message from another rank has come.
    """

    progress: int
    is_busy: bool
    text: str
    waits: bool = False


@dataclass(frozen=True, slots=True)
class _Note:
    """What a rank was doing at a time (seconds since the epoch)."""

    at: float
    status: Status

    def as_text(self) -> str:
        status = self.status
        return f"{self.at:.3f} {status.progress} {status.is_busy:d} {status.waits:d} {status.text}"

    @classmethod
    def of(cls, text: str) -> _Note:
        at, progress, is_busy, waits, doing = text.split(" ", 4)
        status = Status(int(progress), is_busy == "1", doing, waits=waits == "1")
        return cls(float(at), status)

    @property
    def age_s(self) -> float:
        return time.time() - self.at


class Watchdog(threading.Thread):
    """Watches one executor for as long as it lives. Mutable: a thread."""

    def __init__(
        self,
        status: Callable[[], Status],
        store: dist.Store,
        rank: int,
        world_size: int,
        end: Callable[[str], None] | None = None,
        step_s: float = 0.0,
    ) -> None:
        """`status` is a bound method; it is called from the thread, and held weakly. `end` is
        called with what to tell where a stall ends the run. `step_s` is the predicted time of a
        step: a single message of a slow network may take most of it.
        """
        super().__init__(name="planner-watchdog", daemon=True)
        self._status = weakref.WeakMethod(status)
        self._store = dist.PrefixStore("planner-watchdog", store)
        self._rank, self._world_size = rank, world_size
        self.stall_s = float(os.environ.get(STALL_S, max(_DEFAULT_STALL_S, step_s)))
        ends_s = os.environ.get(ENDS_S)
        self._ends_s = None if ends_s is None else float(ends_s)
        self._end = end
        self._stopped = threading.Event()
        self._stacks_told = 0

    def stop(self) -> None:
        """End the thread: one that is inside the store when the interpreter ends aborts it."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=_DEFAULT_STALL_S)

    def run(self) -> None:
        """Note and compare until the executor or the store is gone."""
        progress, moves, since = -1, -1, time.monotonic()
        while not self._stopped.wait(self.stall_s / 4):
            status = self._status()
            if status is None:
                return
            now = status()
            try:
                self._store.set(str(self._rank), _Note(time.time(), now).as_text())
                # 1 if this rank has moved since its last look; adding 0 reads the count of all
                # ranks.
                counted = self._store.add(_MOVES, int(now.progress != progress))
                if counted != moves or not now.is_busy:
                    progress, moves, since = now.progress, counted, time.monotonic()
                stalled_s = time.monotonic() - since
                # Ranks that are stuck together read the same count: the first to add tells it.
                if stalled_s >= self.stall_s and self._store.add(f"{_TELLER}-{moves}", 1) == 1:
                    self._tell()
                self._tell_stacks()
                if self._ends_s is not None and stalled_s >= self.stall_s + self._ends_s:
                    self._give_up(now, stalled_s)
            except RuntimeError:  # the run is over and the store gone
                return

    def _tell(self) -> None:
        lines = [f"planner: nothing has moved for {self.stall_s:.0f} s; the ranks are in"]
        held_up_by = []
        for rank, note in enumerate(self._notes()):
            if note is None:
                lines.append(f"  rank {rank}: not heard of yet")
                continue
            silent = f" (silent for {note.age_s:.0f} s)" if note.age_s > self.stall_s else ""
            lines.append(f"  rank {rank}: {note.status.text}{silent}")
            if not note.status.waits:
                held_up_by.append(f"rank {rank} ({note.status.text})")
        if 0 < len(held_up_by) < self._world_size:
            lines.append(f"  all others wait, in the end, for {', '.join(held_up_by)}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        self._store.add(_STACKS, 1)

    def _notes(self) -> list[_Note | None]:
        keys = map(str, range(self._world_size))
        return [
            _Note.of(self._store.get(key).decode()) if self._store.check([key]) else None
            for key in keys
        ]

    def _tell_stacks(self) -> None:
        """Print where this rank's threads are, once for each stall that any rank has told."""
        told = self._store.add(_STACKS, 0)
        if told == self._stacks_told:
            return
        self._stacks_told = told
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        # In one piece: all ranks write to one terminal.
        print(f"planner: stacks of rank {self._rank}\n{stacks}", file=sys.stderr, flush=True)

    def _give_up(self, now: Status, stalled_s: float) -> None:
        """End the run, unless a rank is alive in the user's own code, which takes what it takes."""
        fresh = [note.status for note in self._notes() if note and note.age_s <= self.stall_s]
        if self._end is not None and all(status.is_busy for status in fresh):
            self._end(f"planner: rank {self._rank} has not moved for {stalled_s:.0f} s: {now.text}")


def end_of_stall(text: str) -> None:
    """End this process, and by that the run: a thread inside a library takes no exception."""
    claim(Failure(kind="hang", rank=dist.get_rank(), text=text))
    sys.stderr.flush()
    os._exit(1)


def start_watchdog(status: Callable[[], Status], *, step_s: float) -> None:
    """Watch a rank, unless it is alone or the environment says not to.

    `step_s` is the predicted time of a step.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    if dist.get_world_size() == 1:
        return
    # Engines of one script are watched apart: their ranks' notes would overwrite each other.
    store = dist.PrefixStore(f"engine-{next(_started)}", _get_default_store())
    dog = Watchdog(
        status,
        store,
        dist.get_rank(),
        dist.get_world_size(),
        end=end_of_stall,
        step_s=step_s,
    )
    if dog.stall_s > 0:
        dog.start()
        atexit.register(dog.stop)
