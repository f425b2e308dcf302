"""Says what every rank is doing when nothing moves any more.

A thread on each rank notes every few seconds, in the store that the processes met at, which
job the rank is in and what it waits for. The first rank that has been in one job for too
long collects all notes and prints them once; then every rank prints its Python stacks. Nothing is
ended unless PLANNER_STALL_ENDS is set, as it is where a run is kept: a slow disk may have stalled
it, and the communication backend's own timeout ends it. The stacks are those of
all threads of a rank, by `faulthandler`.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from planner.runtime.start.failures import Failure, claim

STALL_S = "PLANNER_STALL_S"
"""Environment variable: seconds in one job that count as a stall; 0 turns the watchdog off."""

ENDS_S = "PLANNER_STALL_ENDS"
"""Environment variable: seconds after which a stall that was told ends the run; unset, never."""

_DEFAULT_STALL_S = 20.0
_STACKS = "stacks"
_TELLER = "teller"


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank is doing: `progress` counts the jobs started; idle between steps.

    `waits` says that it can't go on before a message from another rank has come.
    """

    progress: int
    is_busy: bool
    text: str
    waits: bool = False


class Watchdog(threading.Thread):
    """Watches one executor for as long as it lives. Mutable: a thread."""

    def __init__(
        self,
        status: Callable[[], Status],
        store: dist.Store,
        rank: int,
        world_size: int,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """`status` is a bound method; it is called from the thread, and held weakly. `end` is
        called with what to tell where a stall ends the run.
        """
        super().__init__(name="planner-watchdog", daemon=True)
        self._status = weakref.WeakMethod(status)
        self._store = dist.PrefixStore("planner-watchdog", store)
        self._rank, self._world_size = rank, world_size
        self.stall_s = float(os.environ.get(STALL_S, _DEFAULT_STALL_S))
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
        progress, since, told = -1, time.monotonic(), 0.0
        while not self._stopped.wait(self.stall_s / 4):
            status = self._status()
            if status is None:
                return
            now = status()
            if now.progress != progress or not now.is_busy:
                progress, since = now.progress, time.monotonic()
            try:
                note = f"{time.time():.0f} {now.progress} {now.waits:d} {now.text}"
                self._store.set(str(self._rank), note)
                stalled_s = time.monotonic() - since
                if stalled_s >= self.stall_s and told < since:
                    self._tell()
                    told = time.monotonic()
                self._tell_stacks()
                if self._ends_s is not None and stalled_s >= self.stall_s + self._ends_s:
                    self._give_up(now, stalled_s)
            except RuntimeError:  # the run is over and the store gone
                return

    def _tell(self) -> None:
        ranks = range(self._world_size)
        notes = [
            self._store.get(str(rank)).decode().split(" ", 3)
            if self._store.check([str(rank)])
            else None
            for rank in ranks
        ]
        # Ranks that are stuck together read the same counts of jobs, and the first to add says it;
        # a run stalled for long is told of again when any rank has begun another job.
        stall = "-".join("?" if note is None else note[1] for note in notes)
        if self._store.add(f"{_TELLER}-{stall}", 1) > 1:
            return
        lines = [f"planner: nothing has moved for {self.stall_s:.0f} s; the ranks are in"]
        held_up_by = []
        for rank, note in zip(ranks, notes, strict=True):
            if note is None:
                lines.append(f"  rank {rank}: not heard of yet")
                continue
            at, _, waits, text = note
            age_s = time.time() - float(at)
            silent = f" (silent for {age_s:.0f} s)" if age_s > self.stall_s else ""
            lines.append(f"  rank {rank}: {text}{silent}")
            if waits == "0":
                held_up_by.append(f"rank {rank} ({text})")
        if 0 < len(held_up_by) < self._world_size:
            lines.append(f"  all others wait, in the end, for {', '.join(held_up_by)}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        self._store.add(_STACKS, 1)

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
        if self._end is not None:
            self._end(f"planner: rank {self._rank} has not moved for {stalled_s:.0f} s: {now.text}")


def end_of_stall(text: str) -> None:
    """End this process, and by that the run: a thread inside a library takes no exception."""
    claim(Failure(kind="hang", rank=dist.get_rank(), text=text))
    sys.stderr.flush()
    os._exit(1)


def start_watchdog(status: Callable[[], Status]) -> None:
    """Watch a rank, unless it is alone or the environment says not to."""
    from torch.distributed.distributed_c10d import _get_default_store

    if dist.get_world_size() == 1:
        return
    dog = Watchdog(
        status, _get_default_store(), dist.get_rank(), dist.get_world_size(), end=end_of_stall
    )
    if dog.stall_s > 0:
        dog.start()
        atexit.register(dog.stop)
