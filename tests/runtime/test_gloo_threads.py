"""Gloo's socket threads stand behind those that compute (M2)."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from planner.runtime.gloo_threads import LAST_OF_ALL, SOCKET_THREAD, put_socket_threads_last


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_socket_threads_come_last_and_all_others_stay():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    threads = {
        int(task.name): (task / "comm").read_text().strip()
        for task in Path("/proc/self/task").iterdir()
    }
    put_socket_threads_last()
    priorities = {
        thread: os.getpriority(os.PRIO_PROCESS, thread)
        for thread in threads
        if Path(f"/proc/self/task/{thread}").exists()
    }
    sockets = {thread for thread, name in threads.items() if name == SOCKET_THREAD}
    assert sockets
    assert {priorities[thread] for thread in sockets} == {LAST_OF_ALL}
    assert {priorities[thread] for thread in priorities if thread not in sockets} == {0}
    del group
