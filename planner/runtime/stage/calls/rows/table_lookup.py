"""Looking up rows of a table whose gradient is rows (`planner.runtime.state.tables`)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = "rows_of_table"
"""Attribute of a parameter whose gradients are rows: the keeper of its rows."""


class KeepsRows(Protocol):
    """The keeper of a table's rows, as lookups use it (`planner.runtime.state.tables.RowTable`)."""

    @property
    def is_on_host(self) -> bool:
        """Whether the host has the table."""

    def lookup(self, weight: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers, where the table is, and their rows, on the device."""

    def add(self, numbers: Tensor, rows: Tensor, padding_idx: int) -> None:
        """Keep gradients of rows, [n, width], with their numbers [n]."""


def table_lookup(weight: Tensor, indices: Tensor, padding_idx: int, is_sparse: bool) -> Tensor:
    """Return the rows of `weight` [rows, width] that `indices` name, [*indices, width].

    Their gradients go to the keeper of the table's rows (which may have the table on the host);
    without one the gradient is dense.
    """
    table: KeepsRows | None = getattr(weight, ROWS, None)
    if table is None:
        assert weight.stride(0) or len(weight) < 2, "a stand-in of a table on the host has no rows"
        return F.embedding(indices, weight, None if padding_idx < 0 else padding_idx)
    found: Tensor = _TableLookup.apply(weight, indices, padding_idx, table)
    return found


class _TableLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, table: KeepsRows
    ) -> Tensor:
        ctx.table, ctx.padding_idx = table, padding_idx
        numbers, rows = table.lookup(weight.detach(), indices)
        if table.is_on_host:
            ctx.numbers = numbers  # there already: the device need not keep them
        else:
            ctx.save_for_backward(numbers)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        numbers = ctx.numbers if ctx.table.is_on_host else ctx.saved_tensors[0]
        ctx.table.add(numbers.reshape(-1), grad.reshape(-1, grad.shape[-1]), ctx.padding_idx)
        return None, None, None, None
