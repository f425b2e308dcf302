"""Strides follow PyTorch's own rules: every result is compared with torch's."""

from __future__ import annotations

import itertools

import pytest
import torch

from planner.language.ops.strides import (
    contiguous_strides,
    densified_strides,
    has_rows,
    is_contiguous,
    is_dense,
    reshaped_strides,
)

TENSORS = [
    torch.empty(order_of).permute(order)
    for order_of in ((2, 3, 4), (4, 1, 6), (2, 2, 2))
    for order in itertools.permutations(range(3))
]
SHAPES = [(24,), (2, 12), (4, 6), (2, 3, 4), (8,), (4, 2), (1, 24), (6, 2, 2), (4, 6, 1)]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{tuple(t.shape)}{t.stride()}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_view_of_another_shape(tensor, shape):
    try:
        expected = tensor.view(shape).stride()
    except RuntimeError:
        expected = None
    assert reshaped_strides(tensor.shape, tensor.stride(), shape) == expected


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{tuple(t.shape)}{t.stride()}")
def test_kinds_of_strides(tensor):
    shape, strides = tuple(tensor.shape), tensor.stride()
    assert is_contiguous(shape, strides) == tensor.is_contiguous()
    assert is_dense(shape, strides)
    assert not is_dense(shape, tuple(2 * step for step in strides))
    assert contiguous_strides(shape) == torch.empty(shape).stride()
    pointwise = (tensor + 1).stride()
    same = zip(shape, densified_strides(shape, strides), pointwise, strict=True)
    assert all(size == 1 or dense == step for size, dense, step in same)


def test_rows_fold_where_the_dims_in_front_follow_each_other():
    x = torch.empty(2, 3, 4)
    assert has_rows(x.shape, x.stride())
    assert not has_rows((3, 2, 4), x.transpose(0, 1).stride())
