"""Work that all ranks do and that fails on all of them when it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from planner.errors import PlanError, PlannerError

T = TypeVar("T")


def together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """Return what `work` returns on each rank of a group for host messages; all ranks call it.

    Raises PlanError on every rank where it raised an error of the user's or of the system's files
    on any, RuntimeError for another error.
    """
    own: tuple[Any, str, bool] = (None, "", False)
    raised: Exception | None = None
    try:
        own = (work(), "", False)
    except Exception as error:
        raised = error
        of_user = isinstance(error, (PlannerError, OSError))
        text = str(error) if isinstance(error, PlannerError) else f"{type(error).__name__}: {error}"
        own = (None, text or type(error).__name__, of_user)
    # A rank that failed takes part all the same: the others would wait for it for ever.
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    for rank, (_, failure, of_user) in enumerate(found):
        if failure and of_user:
            raise PlanError(failure) from raised
        if failure:
            raise RuntimeError(f"rank {rank}: {failure}") from raised
    return [value for value, _, _ in found]
