"""BatchNorm in a module that is to be captured: what its forward reads of values and of ranks.

With ``momentum=None`` running statistics are the mean over all steps: the forward turns a count in
a buffer into a number, which no graph holds. The copy to capture says `CUMULATIVE` for it, and
ranks read their buffer. SyncBatchNorm looks for ranks and their devices; a copy is a plain
BatchNorm, which it is in one process.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.language.across.cut.batch_statistics import CUMULATIVE

Module = TypeVar("Module", bound=nn.Module)


class BatchNorm(_BatchNorm):
    """A SyncBatchNorm of one process."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def without_sync(module: Module) -> Module:
    """Make each SyncBatchNorm inside a module a plain one, in place; returns it."""
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = BatchNorm  # type: ignore[assignment]
    return module


def with_told_momentum(module: Module) -> Module:
    """Mark each norm inside a module whose running statistics are means over all steps, in place;
    returns it. It is for a capture alone: no kernel takes the mark.
    """
    for part in module.modules():
        if (
            isinstance(part, _BatchNorm)
            and part.momentum is None
            and part.training
            and part.track_running_stats
            and part.num_batches_tracked is not None
        ):
            part.momentum = CUMULATIVE
    return module
