"""Gloo's socket threads stand behind those that compute (M2)."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from planner.runtime.process.groups.gloo_threads import (
    LAST_OF_ALL,
    SOCKET_THREAD,
    put_socket_threads_last,
)
from tests.spawn import until


def names_of_threads() -> dict[int, str]:
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def socket_threads() -> set[int]:
    return {thread for thread, name in names_of_threads().items() if name == SOCKET_THREAD}


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_socket_threads_come_last_and_all_others_stay():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    until(socket_threads)  # a thread names itself, once it runs
    threads = names_of_threads()
    put_socket_threads_last()
    # Not those that have named themselves, or ended, meanwhile.
    settled = dict(threads.items() & names_of_threads().items())
    priorities = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in settled}
    sockets = {thread for thread, name in settled.items() if name == SOCKET_THREAD}
    assert sockets
    assert {priorities[thread] for thread in sockets} == {LAST_OF_ALL}
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {priorities[thread] for thread in priorities if thread not in sockets} == {ours}
    del group
