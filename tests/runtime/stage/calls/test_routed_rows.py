"""Rows sorted by expert and back, beside loops over rows; gradients beside autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planner.runtime.stage.calls.rows.routed_rows import (
    bias_of_runs,
    product_of_runs,
    sort_rows,
    stack_of_runs,
    unsort_rows,
)

EXPERTS, WIDTH, MADE = 4, 3, 2


def inputs(seed: int, rows: int, copies: int) -> tuple[Tensor, ...]:
    """Rows, experts (of which the last is never chosen), matrices, biases, weights."""
    torch.manual_seed(seed)
    made = [
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((rows, WIDTH), (EXPERTS, WIDTH, MADE), (EXPERTS, MADE), (rows, copies))
    ]
    experts = torch.stack([torch.randperm(EXPERTS - 1)[:copies] for _ in range(rows)])
    return made[0], experts, *made[1:]


def by_calls(rows, experts, matrices, biases, weights) -> Tensor:
    copies, order, ends = sort_rows(rows, experts, EXPERTS)
    stacked = stack_of_runs(ends, list(matrices))
    made = bias_of_runs(product_of_runs(copies, stacked, ends), biases, ends)
    return unsort_rows(made, order, weights, experts.shape[1])


def by_rows(rows, experts, matrices, biases, weights) -> Tensor:
    """The definition: each row through each of its experts, times its weight."""
    return torch.stack(
        [
            sum(
                weights[r, c] * (row @ matrices[e] + biases[e])
                for c, e in enumerate(experts[r].tolist())
            )
            for r, row in enumerate(rows)
        ]
    )


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance():
    """Memory that is not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_are_those_of_a_loop_over_rows(seed, copies):
    given = inputs(seed, rows=5, copies=copies)
    found, expected = by_calls(*given), by_rows(*given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(expected)
    wanted = [given[0], *given[2:]]
    for mine, own in zip(
        torch.autograd.grad(found, wanted, cotangent),
        torch.autograd.grad(expected, wanted, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(mine, own, rtol=1e-12, atol=1e-12)


def test_rows_lie_by_expert_and_runs_end_where_they_end():
    rows = torch.arange(4.0)[:, None]
    experts = torch.tensor([[2, 0], [0, 1], [2, 1], [7, 0]])  # (7 is beyond: in no run)
    copies, order, ends = sort_rows(rows, experts, 4, stable=True)
    assert order.tolist() == [1, 2, 7, 3, 5, 0, 4, 6]
    assert copies[:, 0].tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert (ends.tolist(), ends.dtype) == ([3, 5, 7, 7], torch.int32)
    products = product_of_runs(copies, torch.ones(4, 1, 1), ends)
    assert products[:, 0].tolist() == [0, 1, 3, 1, 2, 0, 2, 0]  # of no expert: zero


def test_without_weights_copies_are_added_up():
    rows = torch.randn(3, 2, dtype=torch.float64)
    copies, order, _ = sort_rows(rows, torch.tensor([[1, 0], [0, 2], [2, 1]]), 3)
    torch.testing.assert_close(unsort_rows(copies, order, None, 2), 2 * rows)
