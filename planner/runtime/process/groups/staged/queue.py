"""What one communicator was given, run in order by a thread; and what it tells when it is stuck."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_ASKED = "staged/asked"
"""Set in the store of all ranks once a rank wants to be told what the others have given."""
_TOLD_S, _LOOK_S = 5.0, 0.2
"""Seconds within which ranks tell it, and between two looks at whether they are asked."""
_LATE = 0.9
"""The share of its limit after which an operation that failed has failed for that."""


class Stuck(RuntimeError):
    """What ranks have given a communicator can't run: with NCCL they would wait for ever."""


class Operation:
    """An operation, given to a communicator. `text` says what it is; `run` ends when it has.

    Mutable: whether it has ended, and how.
    """

    def __init__(self, text: str, run: Callable[[], None]) -> None:
        self.text, self.run = text, run
        self.error: BaseException | None = None
        self.ended = threading.Event()


class Work(dist.Work):
    """The handle of operations, as torch's callers have it; done where it has none."""

    def __init__(self, *operations: Operation) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operations have ended; raise what they raised."""
        for operation in self._operations:
            operation.ended.wait()
            if operation.error is not None:
                raise operation.error
        return True

    def is_completed(self) -> bool:
        """Whether they have ended."""
        return all(each.ended.is_set() and each.error is None for each in self._operations)


class Queue:
    """A communicator's operations in the order given, and the thread that runs them. Mutable.

    `ranks` are the global numbers of its ranks, `here` is this process's among them.
    """

    def __init__(
        self, store: dist.Store, *, ranks: Sequence[int], here: int, limit: timedelta
    ) -> None:
        self.ranks, self.here, self.limit = tuple(ranks), here, limit
        self._root = _root(store)
        self._given: deque[Operation] = deque()
        self._changed = threading.Condition()
        self._broken: BaseException | None = None
        self._is_closed = False
        _tell_when_asked(self._root, self)
        threading.Thread(target=self._run_all, daemon=True, name="staged").start()

    def give(self, text: str, run: Callable[[], None]) -> Work:
        """Give an operation; raise what ended the communicator, if it has."""
        operation = Operation(text, run)
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._given.append(operation)
            self._changed.notify()
        return Work(operation)

    def close(self) -> None:
        """End the thread once all that was given has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._given or self._is_closed)
                if not self._given:
                    return
                operation = self._given[0]
            begun = time.monotonic()
            try:
                operation.run()
            except BaseException as error:
                self._end_all(self._explained(error, time.monotonic() - begun))
                return
            with self._changed:
                self._given.popleft()
            operation.run = _nothing  # it holds tensors, and handles may live on
            operation.ended.set()

    def _end_all(self, error: BaseException) -> None:
        with self._changed:
            self._broken = error
            for operation in self._given:
                operation.error = error
                operation.ended.set()

    def _explained(self, error: BaseException, waited_s: float) -> BaseException:
        """Return ranks that wait for each other in place of what gloo says of it."""
        is_late = waited_s >= _LATE * self.limit.total_seconds()
        # The rank that gives up first closes its connections, for which the others' then fail.
        if isinstance(error, Stuck) or not (is_late or self._root.check([_ASKED])):
            return error
        return self.stuck(f"has not moved for {waited_s:.0f} s")

    def stuck(self, what: str) -> Stuck:
        """Return the error of a communicator that can't go on, with what each rank has given."""
        self._root.set(_ASKED, "1")
        keys = {rank: _key(rank) for rank in self.ranks}
        until = time.monotonic() + _TOLD_S
        while not self._root.check(list(keys.values())) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        lines = [f"the communicator of ranks {named(self.ranks)} {what}; given and not ended:"]
        for rank, key in keys.items():
            is_told = self._root.check([key])
            lines.append(self._root.get(key).decode() if is_told else f"rank {rank} is gone")
        return Stuck("\n".join(lines))

    def described(self) -> str:
        """Return what was given and has not ended, in order; empty where nothing is."""
        with self._changed:
            given = [operation.text for operation in self._given]
        return f"to ranks {named(self.ranks)}: {', then '.join(given)}" if given else ""


def _nothing() -> None:
    """What an operation that has ended would run."""


def named(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks in words."""
    return ", ".join(map(str, ranks))


def _key(rank: int) -> str:
    return f"staged/told/{rank}"


def _root(store: Any) -> dist.Store:
    """Return the store of all ranks, which groups put prefixes in front of."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()
"""Those of this process."""


def _tell_when_asked(root: dist.Store, queue: Queue) -> None:
    """Tell this rank's queues once a rank asks for them, whatever this rank then waits for."""
    is_first = not _queues
    _queues.add(queue)
    rank = queue.ranks[queue.here]

    def watch() -> None:
        with suppress(RuntimeError):  # the rank that has the store is gone
            while not root.check([_ASKED]):
                time.sleep(_LOOK_S)
            given = [text for each in list(_queues) if (text := each.described())]
            root.set(_key(rank), f"rank {rank} gave {'; '.join(given) or 'nothing'}")

    if is_first:
        threading.Thread(target=watch, daemon=True, name="staged-watch").start()
