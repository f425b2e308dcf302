"""Runs a function on several gloo ranks, quickly: ranks fork from a server that has torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import tests.captures  # noqa: F401  # ranks share this process's captures

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.spawn_preload"])

PATIENCE_S = 240
"""Seconds after which something hangs: below the limit of a test, and far above what any takes."""
PORTS = range(20_000, 30_000)
"""Linux gives those from 32,768 on to connections, other systems from 49,152 on."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 600,
) -> list[Any]:
    """Return what `function(*args)` returns on each rank of a world of gloo, or of `staged`.

    `function` must be importable by name. An exception on any rank fails the call with its
    traceback, and ends the other ranks. `timeout_s` is how long an operation may take.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        ranks = start_ranks(
            function, world_size, *args, queue=queue, store=Path(folder) / "store",
            backend=backend, timeout_s=timeout_s,
        )  # fmt: skip
        results: dict[int, Any] = {}
        try:
            for _ in ranks:
                rank, value, failure = pickle.loads(_next(queue, ranks))
                if failure:
                    raise AssertionError(f"rank {rank} failed:\n{failure}")
                results[rank] = value
        finally:
            for process in ranks:
                if len(results) < world_size:
                    process.kill()
                process.join()
                process.close()
            queue.close()
    return [results[rank] for rank in range(world_size)]


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    queue: Any,
    store: Path,
    backend: str = "gloo",
    timeout_s: float = 600,
) -> list[Any]:
    """Start the ranks' processes, which meet by a file `store` and put what they return in `queue`.

    For tests that end them before they return; others take `run_ranks`.
    """
    ranks = [
        context.Process(
            target=_run, args=(queue, function, rank, world_size, store, args, backend, timeout_s)
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def _next(queue: Any, ranks: list[Any]) -> Any:
    if not queue._reader.poll(PATIENCE_S):
        raise AssertionError(f"no rank of {len(ranks)} answered within {PATIENCE_S} s")
    return queue.get()


def _run(
    queue: Any,
    function: Any,
    rank: int,
    world_size: int,
    store: Path,
    args: Any,
    backend: str,
    timeout_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    from planner.runtime.process.groups import staged

    torch.set_num_threads(1)
    os.environ["PLANNER_TIMEOUT_S"] = str(timeout_s)
    if backend == staged.NAME:
        staged.register()
        os.environ["PLANNER_BACKEND"] = backend
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # Pickled here, so tensors travel as bytes: a rank may end before they are read.
        queue.put(pickle.dumps((rank, function(*args), None)))
        with suppress(RuntimeError):  # a test may have broken the group on purpose
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put(pickle.dumps((rank, None, traceback.format_exc())))
        os._exit(1)


def is_running(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """Return a TCP port nobody listens on, and which is this process's until it ends.

    It is below those that a system gives to connections, one of which could take it before it is
    used. UDP's port of the same number is held meanwhile: other processes of tests see so that it
    is taken.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with (
            socket.socket(type=socket.SOCK_DGRAM) as held,
            socket.socket() as probe,
            suppress(OSError),
        ):
            for each in (held, probe):
                each.bind(("127.0.0.1", port))
            held.detach()
            return port
    raise AssertionError(f"no port of {PORTS} is free")


def until(
    happens: Callable[[], object], told: Callable[[], str] = str, *, each_s: float = 0.02
) -> None:
    """Wait until something happens; fail with what is `told` where it never does.

    The limit is there for what hangs, so it is one that a busy machine keeps.
    """
    ends = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < ends, f"it did not happen within {PATIENCE_S} s: {told()}"
        time.sleep(each_s)
