"""The host's side of a rank whose memory a ledger counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.capture.modes.ledger import Ledger
from planner.runtime.stage.host import Host, Pairs, Ticket
from planner.runtime.state.rank_state import RankState
from planner.runtime.state.tables import table_of


class _Done:
    """Copies of nothing, which are over at once."""

    def wait(self) -> None:
        """Go on."""

    def hold_device(self) -> None:
        """Go on."""


class CountedHost(Host):
    """The host's side of a rank whose memory a ledger counts."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        super().__init__(device)
        self._ledger = ledger

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, is_copied: bool = False) -> Tensor:
        """Return an empty tensor on the host."""
        with self.holding():
            return super().empty(shape, dtype, is_copied=is_copied)

    def holding(self) -> AbstractContextManager[None]:
        """Count what is made inside as the host's."""
        return self._ledger.counting_as_host()

    def _begin(self, pairs: Pairs, direction: str, name: str) -> Ticket:
        return _Done()


def count_shards_as_host(state: RankState, ledger: Ledger) -> None:
    """Count as the host's what FSDP2 would copy there: it leaves out copies from CPU to CPU."""
    for copies in state.trained.by_name().values():
        for param in copies:
            if isinstance(param, DTensor):
                ledger.move_to_host(param._local_tensor)
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(
                        lambda shard: ledger.move_to_host(shard.grad._local_tensor)
                    )


def count_tables_as_host(state: RankState, ledger: Ledger) -> None:
    """Count the optimizer's state of tables on the host as the host's, where it steps on them."""
    optimizer = state.optimizer
    for copies in state.trained.stepped_by_name().values() if optimizer is not None else ():
        for param in copies:
            table = table_of(param)
            if table is not None and table.is_on_host:
                assert optimizer is not None
                for value in optimizer.state.get(param, {}).values():
                    if isinstance(value, Tensor):
                        ledger.move_to_host(value)
