"""A rank whose script ended before the others': who it was, for those that then wait for it.

All that such ranks are told by the backend is that a connection was closed. So a rank that ends
well leaves how many steps it made, in the store that ranks met at and, as that may go with a rank,
in a file beside the one for failures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from typing import NoReturn

import torch.distributed as dist

from planner.runtime.process.failures import FAILURE_FILE, end_process

_ROUND = "TORCHELASTIC_RESTART_COUNT"


class _Steps:
    """The steps of all engines of this process. Mutable: counts."""

    begun = done = 0
    is_used = False


_steps = _Steps()


@contextmanager
def counted_step() -> Iterator[None]:
    """Count what is inside as a step of an engine."""
    _steps.is_used = True
    _steps.begun += 1
    yield
    _steps.done += 1


def tell_end() -> None:
    """Leave for other ranks that this one's script has ended."""
    if not (_steps.is_used and dist.is_initialized() and dist.get_world_size() > 1):
        return
    rank = str(dist.get_rank())
    with suppress(OSError):
        if path := _path(rank):
            with open(path, "w") as file:
                file.write(str(_steps.done))
    with suppress(RuntimeError):  # of a store that is gone
        _store().set(rank, str(_steps.done))


def who_ended() -> str:
    """Return which rank this one has waited for in vain, in a line; empty where none had ended."""
    rank = int(os.environ.get("RANK", "0"))
    for other, done in sorted(_ended(int(os.environ.get("WORLD_SIZE", "1"))).items()):
        # (A rank that made as many steps as this one has begun can have ended in its time.)
        if other != rank and done < _steps.begun:
            return (
                f"rank {other}'s script had ended after {_counted(done)}, and rank {rank} was in "
                f"step {_steps.begun}; every rank makes the same steps, so let all loops end "
                "together (engine.loader ends on all ranks at once; loaders of your own need as "
                "many batches on each)"
            )
        if other != rank and done == _steps.done and _steps.done == _steps.begun:
            return (
                f"rank {other}'s script had ended after {_counted(done)}, and rank {rank} waited "
                "for it behind these (evaluate, save, full_state_dict and the like are called by "
                "every rank); call them on all ranks"
            )
    return ""


def _counted(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _ended(world_size: int) -> dict[int, int]:
    """Return the steps of the ranks that ended, as far as this one can know."""
    found = {}
    for path in glob(_path("*")) if _path("*") else ():
        with suppress(OSError, ValueError), open(path) as file:
            found[int(path.rpartition("-")[2])] = int(file.read())
    with suppress(RuntimeError, ValueError):
        store = _store()
        for rank in range(world_size):
            if rank not in found and store.check([str(rank)]):
                found[rank] = int(store.get(str(rank)))
    return found


def _path(rank: str) -> str:
    """The file of a rank in this round of the run; empty without a launcher."""
    failure = os.environ.get(FAILURE_FILE)
    return f"{failure}-ended-{os.environ.get(_ROUND, '0')}-{rank}" if failure else ""


def _store() -> dist.Store:
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.PrefixStore("planner-ended", _get_default_store())


def end_rank() -> NoReturn:
    """End a rank whose part is done though its script is not."""
    tell_end()
    if dist.is_initialized():
        dist.destroy_process_group()
    end_process(0)
