"""Making all groups of an axis in one call, where the backend splits a communicator.

NCCL makes each group by splitting the communicator of all ranks, in which all of them take part:
one call for each line of 8 x 8 x 8 ranks would be 142 of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def can_split(groups: Sequence[Sequence[int]]) -> bool:
    """Whether groups can be made in one call: the backend splits communicators, and no rank is in
    two of the groups, whose ranks ascend (a split numbers them so).
    """
    default = dist.group.WORLD
    device = getattr(default, "bound_device_id", None)
    ranks = [rank for group in groups for rank in group]
    return (
        type(default) is dist.ProcessGroup
        and device is not None
        and default._get_backend(torch.device(device)).supports_splitting
        and len(set(ranks)) == len(ranks)
        and all(list(group) == sorted(group) for group in groups)
    )


def split(groups: Sequence[Sequence[int]], *, timeout: timedelta, options: Any) -> Any:
    """Split the group of all ranks; return the group that this rank is in, alone where none of the
    given has it.

    All ranks are in a group: torch names a group by how many its process has, and those must be as
    many on every rank.
    """
    inside = {rank for group in groups for rank in group}
    alone = [[rank] for rank in range(dist.get_world_size()) if rank not in inside]
    return dist.split_group(
        split_ranks=[*map(list, groups), *alone], timeout=timeout, pg_options=options
    )
