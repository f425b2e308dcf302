"""Strides: how a tensor's entries lie in memory, with PyTorch's own rules.

Whether `reshape` or `contiguous` copies depends on strides alone. Strides count elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return row-major strides of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a tensor is row-major; dims of size one may have any stride."""
    return prod(shape) == 0 or all(
        size == 1 or stride == expected
        for size, stride, expected in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def reshaped_strides(
    shape: Sequence[int], strides: Strides, new_shape: Sequence[int]
) -> Strides | None:
    """Return the strides of a view of another shape, or None when only a copy can do it.

    The rule of ATen's `computeStride`: old dims that lie one after the other in memory form
    a chunk, and every chunk must be divided exactly among new dims.
    """
    if prod(shape) != prod(new_shape):
        return None
    if prod(shape) == 0 or not shape:
        return contiguous_strides(new_shape)
    new_strides = [0] * len(new_shape)
    view_dim = len(new_shape) - 1
    chunk_base, tensor_numel, view_numel = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        # A chunk goes on while the next dim's stride is that of row-major order.
        ends_chunk = dim == 0 or (
            shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_base
        )
        if not ends_chunk:
            continue
        # New dims, from the last, take the chunk's entries in steps of its innermost stride.
        while view_dim >= 0 and (view_numel < tensor_numel or new_shape[view_dim] == 1):
            new_strides[view_dim] = view_numel * chunk_base
            view_numel *= new_shape[view_dim]
            view_dim -= 1
        # A new dim would reach over the end of the chunk, where memory goes on with another step.
        if view_numel != tensor_numel:
            return None
        if dim > 0:
            chunk_base, tensor_numel, view_numel = strides[dim - 1], 1, 1
    return tuple(new_strides) if view_dim == -1 else None


def densified_strides(shape: Sequence[int], strides: Strides) -> Strides:
    """Return strides without gaps that keep the order of dims in memory."""
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    dense, step = [0] * len(shape), 1
    for dim in order:
        dense[dim] = step
        step *= max(shape[dim], 1)
    return tuple(dense)


def is_dense(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in some order of dims."""
    expected = 1
    # From the innermost dim: each stride is the number of entries inside of it.
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def has_rows(shape: Sequence[int], strides: Strides) -> bool:
    """Whether all dims but the last can be folded into one in place."""
    rows = prod(shape[:-1]), shape[-1]
    return len(shape) <= 2 or reshaped_strides(shape, strides, rows) is not None
