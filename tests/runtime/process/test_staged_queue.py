"""A communicator's operations run in the order given; one that fails ends all behind it."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from planner.runtime.process.groups.staged.queue import _ASKED, Queue, Work, named


@pytest.fixture
def queue():
    store = dist.HashStore()
    made = Queue(store, ranks=(3, 5), here=1, limit=timedelta(seconds=30))
    yield made
    made.close()
    store.set(_ASKED, "1")  # ends what waits to tell


def test_operations_run_in_order_whoever_waits_for_which(queue):
    ran: list[int] = []
    draw = random.Random(0)

    def operation(number: int) -> None:
        time.sleep(draw.random() / 1e4)
        ran.append(number)

    works = [queue.give(f"op {n}", lambda n=n: operation(n)) for n in range(20)]
    works[7].wait()
    assert ran[:8] == [*range(8)]
    works[-1].wait()
    assert ran == [*range(20)]
    assert all(work.is_completed() for work in works)
    assert Work().wait()  # (of nothing)


def test_what_has_not_ended_is_told_in_order(queue):
    gate = threading.Event()
    queue.give("all_reduce of 8", gate.wait)
    last = queue.give("send to 3", lambda: None)
    assert queue.described() == "to ranks 3, 5: all_reduce of 8, then send to 3"
    assert not last.is_completed()
    gate.set()
    last.wait()
    assert named((1, 2)) == "1, 2"


def test_an_error_ends_what_was_given_and_what_comes(queue):
    gate = threading.Event()

    def fails() -> None:
        gate.wait()
        raise ValueError("no such size")

    first, behind = queue.give("first", fails), queue.give("behind", lambda: None)
    gate.set()
    for work in (first, behind):
        with pytest.raises(ValueError, match="no such size"):
            work.wait()
        assert not work.is_completed()
    with pytest.raises(ValueError, match="no such size"):
        queue.give("later", lambda: None)
