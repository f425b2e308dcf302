"""Records what FSDP2 gathers and scatters, each from its start until it is there.

On a CPU, where FSDP2 waits for each of its messages where it sends it. On an accelerator they run
on streams of their own, beside compute, and when a job waited for one is not known: there none is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from planner.runtime.state.narrow_gather import groups_of
from planner.timeline import COLLECTIVE

Recording = Callable[..., AbstractContextManager[object]]
"""What records a collective of the job in work: kind of span, name, rows, group and bytes."""


def record_exchange(stage: nn.Module, record: Recording) -> None:
    """Record the messages of a stage's units from now on."""
    for unit in stage.modules():
        if isinstance(unit, FSDPModule):
            for group in groups_of(unit):
                group._all_gather_comm = _Gather(group._all_gather_comm, record)
                group._reduce_scatter_comm = _Scatter(group._reduce_scatter_comm, record)


class _Recorded:
    """A collective of FSDP2, in a span. `whole`: which of its tensors is that of all ranks."""

    name: str
    whole: int

    def __init__(self, comm: Any, record: Recording) -> None:
        self._comm, self._record = comm, record

    def allocate(self, *size: Any, **how: Any) -> Tensor:
        """Return memory for a message."""
        memory: Tensor = self._comm.allocate(*size, **how)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **how: Any,
    ) -> dist.Work | None:
        """Run it."""
        whole = (output_tensor, input_tensor)[self.whole]
        with self._record(COLLECTIVE, self.name, 0, group.group_name, whole.nbytes):
            work: dist.Work | None = self._comm(output_tensor, input_tensor, group, *args, **how)
        return work


class _Gather(_Recorded, AllGather):
    name, whole = "all_gather", 0


class _Scatter(_Recorded, ReduceScatter):
    name, whole = "reduce_scatter", 1
