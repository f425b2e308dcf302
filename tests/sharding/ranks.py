"""Several ranks in one process: a thread each, with PyTorch's threaded process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what `function(rank)` returns on each rank, in order; re-raise its first error.

    Collectives work between the threads, backward included: autograd on CPU runs backward
    on the thread that asked for it.
    """
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        else:
            dist.destroy_process_group()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results
