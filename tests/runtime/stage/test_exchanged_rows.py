"""M26: tables cut by rows over four ranks, each with its own samples, equal the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from planner.runtime.stage.exchanged_rows import exchanged_embedding
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
