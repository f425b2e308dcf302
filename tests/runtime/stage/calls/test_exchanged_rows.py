"""M26: tables cut by rows over four ranks, each with its own samples, equal the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from planner.runtime.stage.calls.exchanges.table_rows import exchanged_embedding
from tests.spawn import run_ranks

ROWS, WIDTH, PADDING = 16, 3, 5
CASES = {
    "spread": torch.arange(32).view(16, 2) * 7 % ROWS,
    "all of one rank's": torch.full((16, 2), 13),
    "none of one rank's": torch.arange(32).view(16, 2) % 12,
    "the same in all": torch.tensor([[3, 3]]).repeat(16, 1),
    "with padding": torch.tensor([[PADDING, 6]]).repeat(16, 1),
}


def looked_up(table: torch.Tensor, indices: torch.Tensor) -> Any:
    rank, parts = dist.get_rank(), dist.get_world_size()
    rows = table.chunk(parts)[rank].clone().requires_grad_()
    own = indices.chunk(parts)[rank]
    found = exchanged_embedding(rows, own, PADDING, dist.group.WORLD.group_name, parts)
    (found * weights(indices).chunk(parts)[rank]).sum().backward()
    return found.detach(), rows.grad


def weights(indices: torch.Tensor) -> torch.Tensor:
    return torch.arange(indices.numel() * WIDTH, dtype=torch.float64).view(*indices.shape, WIDTH)


def on_ranks(table: torch.Tensor, cases: list[torch.Tensor]) -> Any:
    return [looked_up(table, indices) for indices in cases]


def test_values_and_gradients_equal_the_whole_table_s():
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    by_rank = run_ranks(on_ranks, 4, table, list(CASES.values()))
    for at, (name, indices) in enumerate(CASES.items()):
        dense = table.clone().requires_grad_()
        expected = F.embedding(indices, dense, padding_idx=PADDING)
        (expected * weights(indices)).sum().backward()
        found = torch.cat([each[at][0] for each in by_rank])
        grads = torch.cat([each[at][1] for each in by_rank])
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(grads, dense.grad, rtol=1e-14, atol=0, msg=name)


def test_alone_it_is_a_lookup():
    table = torch.randn(ROWS, WIDTH)
    found = exchanged_embedding(table, torch.tensor([[3], [0]]), -1, "", 1)
    assert torch.equal(found, F.embedding(torch.tensor([[3], [0]]), table))


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_a_number_beyond_the_table(wrong):
    with pytest.raises(IndexError, match=f"is {wrong}, and it has rows 0 to 15"):
        exchanged_embedding(torch.randn(ROWS, WIDTH), torch.tensor([2, wrong]), -1, "", 1)


def refused_on_ranks(table: torch.Tensor, indices: torch.Tensor) -> str:
    try:
        looked_up(table, indices)
    except IndexError as error:
        return str(error)
    return ""


def test_a_number_beyond_the_table_of_one_rank_s_ends_all_ranks():
    """Others would wait for it in the exchange."""
    indices = torch.zeros(16, 2, dtype=torch.int64)
    indices[-1, -1] = ROWS + 3
    said = run_ranks(refused_on_ranks, 4, torch.randn(ROWS, WIDTH), indices)
    assert said == ["an index of an embedding is 19, and it has rows 0 to 15"] * 4


class Reads(TorchDispatchMode):
    """Counts ops for whose results a host waits: numbers read, and sizes that values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        # (An index by numbers has a size that follows from theirs.)
        by_numbers = func is torch.ops.aten.index.Tensor and all(
            index is None or index.dtype != torch.bool for index in args[1]
        )
        if by_values.intersection(func.tags) and not by_numbers:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_for_a_lookup(monkeypatch):
    read: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (read.append(t.numel()), tolist(t))[1])
    table = torch.randn(ROWS, WIDTH, requires_grad=True)
    with Reads() as reads:
        exchanged_embedding(table, torch.tensor([[3, 3], [0, 5]]), -1, "", 1).sum().backward()
    assert (read, reads.found) == ([4], [])
