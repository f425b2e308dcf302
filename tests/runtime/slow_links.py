"""Links and jobs that take a set time: what an engine sends is held back, its jobs sleep."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from planner.language.schedule import Job, JobKind
from planner.runtime.step.engine import Engine
from planner.runtime.step.messages.p2p import Crossing, Message, Post


class SlowLink(threading.Thread):
    """Sends one rank's messages after a delay, one after the other. Mutable: a thread."""

    def __init__(self, transfer_s: float) -> None:
        super().__init__(daemon=True)
        self._transfer_s = transfer_s
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def send(self, send: Any) -> Sent:
        """Call `send`, which returns its work, when the message has crossed the link."""
        sent = Sent()
        self._queue.put((time.perf_counter(), send, sent))
        return sent

    def run(self) -> None:
        """Let one message after the other cross."""
        free_s = 0.0
        while True:
            given_s, send, sent = self._queue.get()
            free_s = max(free_s, given_s) + self._transfer_s
            time.sleep(max(0.0, free_s - time.perf_counter()))
            send().wait()
            sent.done.set()


class Sent:
    """A message on a slow link, as `torch.distributed.Work`."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return self.done.is_set()

    def wait(self) -> None:
        """Wait until it has."""
        self.done.wait()


class SlowGroup:
    """A process group whose sends go over slow links. Stands in for one in a `Post`'s legs."""

    def __init__(self, group: Any, link: SlowLink) -> None:
        self._group, self._link = group, link
        self.recv = group.recv

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Sent:
        """Send later."""
        return self._link.send(lambda: self._group.send(tensors, peer, tag))


def slow_down_links(engine: Engine, transfer_s: float, *, blocking: bool = False) -> None:
    """Hold back what an engine sends; with `blocking` the sender waits for its arrival."""
    post: Post = engine._executor._post
    links: dict[int, SlowLink] = defaultdict(lambda: SlowLink(transfer_s))
    find = post._find_crossing

    def find_slow(*key: Any) -> Crossing:
        crossing = find(*key)
        legs = (
            replace(leg, group=SlowGroup(leg.group, links[crossing.target]))  # type: ignore[arg-type]
            for leg in crossing.legs
        )
        return replace(crossing, legs=tuple(legs))

    post._find_crossing = find_slow  # type: ignore[method-assign]
    if not blocking:
        return
    put = post.put

    def put_and_wait(message: Message, tensor: Tensor) -> None:
        put(message, tensor)
        for sending in post._sending:
            sending.work.wait()

    post.put = put_and_wait  # type: ignore[method-assign]
    # Who waits for its message to arrive gains nothing by sending it within a job.
    engine._executor._sends_first = {}


class Arrival:
    """A receive whose message sets out when it is posted, as `torch.distributed.Work`."""

    def __init__(self, work: Any, transfer_s: float) -> None:
        self._work, self._there_s = work, time.perf_counter() + transfer_s

    def wait(self) -> None:
        """Wait until the message has been sent, and has crossed the link."""
        self._work.wait()
        time.sleep(max(0.0, self._there_s - time.perf_counter()))


class WaitingGroup:
    """A process group whose messages set out no sooner than there is a buffer for them, as those
    too large for a network's own do. Stands in for one in a `Post`'s legs.
    """

    def __init__(self, group: Any, transfer_s: float) -> None:
        self._group, self._transfer_s = group, transfer_s
        self.send = group.send

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Arrival:
        """Post a buffer: the message sets out."""
        return Arrival(self._group.recv(tensors, peer, tag), self._transfer_s)


def send_when_posted(engine: Engine, transfer_s: float) -> None:
    """Let what an engine receives take `transfer_s` from when its buffer is posted."""
    post: Post = engine._executor._post
    find = post._find_crossing

    def find_waiting(*key: Any) -> Crossing:
        crossing = find(*key)
        legs = (replace(leg, group=WaitingGroup(leg.group, transfer_s)) for leg in crossing.legs)  # type: ignore[arg-type]
        return replace(crossing, legs=tuple(legs))

    post._find_crossing = find_waiting  # type: ignore[method-assign]


def sleep_in_jobs(engine: Engine, job_s: float) -> None:
    """Make every job of an engine take `job_s` (a full backward twice that) on top."""
    executor = engine._executor
    computing = executor._computing

    @contextmanager
    def slower(job: Job, *args: Any) -> Iterator[None]:
        with computing(job, *args):
            time.sleep(job_s * (2 if job.kind is JobKind.FULL_BACKWARD else 1))
            yield

    executor._computing = slower  # type: ignore[method-assign]
