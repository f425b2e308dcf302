"""Random tensors of any size in little memory: of large ones, rows are windows on one table.

    tensor[row, ...] = table[127 * row : 127 * row + entries of a row]

A matrix of 128256 x 16384 so takes 65 MB and not 8 GB. Kernels copy what they multiply by, for the
moment. No cut of a plan moves rows and columns by just so much that one window is another: a piece
from a wrong place has other entries.
"""

from __future__ import annotations

from math import prod
from zlib import crc32

import torch
from torch import Tensor

_STEP = 127
_LARGE = 2**22
"""Entries from which on a tensor is made of windows."""


def drawn(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, *, moved: int | None = None
) -> Tensor:
    """Return the random tensor of a name, equal at each call.

    A matrix has entries of deviation 0.02, a vector 1 give or take 0.1, so that what it scales is
    still there. `moved` seeds how entries are moved by one unit in the last place, or not. An
    integer or boolean tensor has zeros.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype)
    rows, row = (shape[0], prod(shape[1:])) if shape else (1, 1)
    step = _STEP if rows * row >= _LARGE else row
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    table = torch.randn(step * max(rows - 1, 0) + row, generator=generator, dtype=dtype)
    table = table.mul_(0.02) if len(shape) > 1 else table.mul_(0.1).add_(1)
    if moved is not None:
        table = moved_by_a_unit(table, crc32(f"{name} {moved}".encode()))
    inner = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return table.as_strided(shape, [step, *inner[1:]] if shape else [])


def moved_by_a_unit(tensor: Tensor, seed: int) -> Tensor:
    """Return a tensor with each entry moved by one unit in the last place, up or down, or not."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    generator = torch.Generator().manual_seed(seed)
    by = torch.randint(-1, 2, tensor.shape, generator=generator, dtype=torch.int8)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * by.to(tensor.dtype))
