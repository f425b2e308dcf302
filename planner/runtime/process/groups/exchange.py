"""Sends and receives between ranks that run at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from planner.runtime.process.groups.staged import Staged


def exchange(operations: Sequence[dist.P2POp]) -> None:
    """Run sends and receives of one group at once, and wait for them.

    In any order of their own two ranks could wait for each other: NCCL runs what a communicator is
    given in order, and a send that waits for its receive would hold up the receive behind it.
    """
    if not operations:
        return
    group = operations[0].group
    at_once: AbstractContextManager[None] = nullcontext()
    # (torch batches for groups in C++ alone.)
    if isinstance(group, Staged):
        at_once = group.at_once()
    with at_once:
        works = dist.batch_isend_irecv(list(operations))
    for work in works:
        work.wait()
