"""M25: what a rank keeps of a step's gradients of rows, and what an optimizer is given of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.runtime.stage.host import Host
from planner.runtime.state.tables import RowTable, by_row, has_sparse_gradient, table_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS, WIDTH = 5, 2
CPU = torch.device("cpu")


def kept(*, is_sparse: bool = True, on_host: bool = False) -> tuple[RowTable, nn.Parameter]:
    table = RowTable(
        "table.weight",
        (),
        is_sparse=is_sparse,
        made=torch.float64,
        dtype=torch.float64,
        device=CPU,
        host=Host(CPU) if on_host else None,
    )
    weight = nn.Parameter(torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH))
    table.keep(weight, weight)
    if on_host:
        table.stepped[0].data.copy_(weight)
    return table, weight


def add(table: RowTable, numbers: list[int], value: float, padding: int = -1) -> None:
    table.add(torch.tensor(numbers), torch.full((len(numbers), WIDTH), value).double(), padding)


@pytest.mark.parametrize("on_host", [False, True])
def test_microbatches_add_up_by_row(on_host: bool):
    table, _ = kept(on_host=on_host)
    add(table, [3, 1, 3], 1.0)
    add(table, [1], 10.0)
    table.sum()
    with table.given():
        grad = table.stepped[0].grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.coalesce().indices().tolist() == [[1, 3]]
        assert grad.to_dense()[:, 0].tolist() == [0, 11, 0, 2, 0]
    assert table.stepped[0].grad is None


def test_a_gradient_that_the_model_has_dense_is_given_dense():
    table, _ = kept(is_sparse=False)
    add(table, [0, 0], 2.0)
    table.sum()
    grad = table.gradient()
    assert grad is not None
    assert not grad.is_sparse
    assert grad[:, 1].tolist() == [4, 0, 0, 0, 0]


def test_rows_of_the_padding_have_no_gradient():
    table, _ = kept()
    add(table, [0, 2], 1.0, padding=0)
    table.sum()
    grad = table.gradient()
    assert grad is not None
    assert grad.coalesce().indices().tolist() == [[2]]


def test_no_more_rows_are_kept_than_the_table_has():
    table, _ = kept()
    for _ in range(20):
        add(table, [1, 2, 3], 1.0)
    assert sum(map(len, table._numbers)) <= ROWS
    table.sum()
    grad = table.gradient()
    assert grad is not None
    assert grad.to_dense()[:, 0].tolist() == [0, 20, 20, 20, 0]


def test_a_step_forgets_the_one_before():
    table, _ = kept()
    add(table, [1], 1.0)
    table.sum()
    table.clear()
    assert table.gradient() is None
    table.sum()  # a step in which nothing was looked up: no row changes
    grad = table.gradient()
    assert grad is not None
    assert grad._nnz() == 0


def test_a_parameter_has_its_table():
    table, weight = kept()
    assert table_of(weight) is table
    assert has_sparse_gradient(weight)
    dense, other = kept(is_sparse=False)
    assert table_of(other) is dense
    assert not has_sparse_gradient(other)
    assert table_of(nn.Parameter(torch.zeros(1))) is None


def test_a_lookup_on_the_host_gives_the_rows_of_the_device():
    for on_host in (False, True):
        table, weight = kept(on_host=on_host)
        indices = torch.tensor([[4, 0], [1, 1]])
        _, rows = table.lookup(weight, indices)
        assert torch.equal(rows, weight.detach()[indices])


def test_rows_of_a_number_are_added_in_their_order():
    """So that copies on several ranks stay equal to the last bit."""
    torch.manual_seed(0)
    numbers, rows = torch.randint(0, 3, (64,)), torch.randn(64, 2)
    unique, sums = by_row(numbers, rows, 3)
    for number, found in zip(unique.tolist(), sums, strict=True):
        expected: Tensor = torch.zeros(2)
        for row in rows[numbers == number]:
            expected = expected + row
        assert torch.equal(found, expected)
