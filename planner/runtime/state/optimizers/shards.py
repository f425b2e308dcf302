"""Steps of optimizers on parameters of which a rank has a shard."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.tensor

from planner.errors import ModelError

_DTENSOR = str(Path(torch.distributed.tensor.__file__).parent)


@contextmanager
def stepping_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise ModelError, in a line, where a step uses what DTensor does not do on shards, such as
    entries that are written by a mask of them (Rprop).
    """
    try:
        yield
    except RuntimeError as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        if not last.filename.startswith(_DTENSOR):
            raise
        said = str(error).splitlines()[0].partition(". ")[0]
        raise ModelError(
            f"{type(optimizer).__name__} can't step on parameters of which ranks have shards "
            f"({said}); take another optimizer, or search for a plan without ZeRO and tp"
        ) from error
