"""M25: a lookup's gradient goes to the keeper of the table's rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.runtime.stage.calls.rows.table_lookup import table_lookup
from planner.runtime.state.tables import RowTable

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def weight_of(rows: int = 6) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(rows, 3, dtype=torch.float64))


@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_rows_and_their_gradients_are_those_of_an_embedding(padding_idx: int):
    weight, cpu = weight_of(), torch.device("cpu")
    own = {"made": torch.float64, "dtype": torch.float64, "device": cpu}
    table = RowTable("table", (), is_sparse=True, **own)
    indices, factor = torch.tensor([[0, 2], [5, 0]]), torch.randn(2, 2, 3, dtype=torch.float64)
    reference = F.embedding(indices, weight, None if padding_idx < 0 else padding_idx)
    (expected,) = torch.autograd.grad((reference * factor).sum(), weight)

    table.keep(weight, weight)
    found = table_lookup(weight, indices, padding_idx, True)
    assert torch.equal(found, reference)
    (found * factor).sum().backward()
    assert weight.grad is None  # a gradient of the table's shape is never made
    table.sum()
    grad = table.gradient()
    assert grad is not None
    torch.testing.assert_close(grad.to_dense(), expected)


def test_without_a_keeper_the_gradient_is_dense():
    weight = weight_of()
    table_lookup(weight, torch.tensor([1, 1]), -1, False).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.is_sparse
    assert weight.grad[:, 0].tolist() == [0, 2, 0, 0, 0, 0]
