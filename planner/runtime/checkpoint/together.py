"""What torch's checkpoints raise for all ranks, told as what went wrong on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def told_plainly() -> Iterator[None]:
    """Raise the first rank's own error for the collection of all that torch's checkpoints raise."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        first.add_note(f"on rank {rank}")
        raise first from None
