"""Random values for a module's tensors, and which of its inputs hold samples that stay apart.

Samples are apart where each one's part of the inputs, given alone, gives that sample's part of
the results. A course that depends on values may hide that on one draw: two samples may take the
same branch by chance. So samples are drawn unlike each other, in several ways: of other means,
of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

_MOST_SPLIT_INPUTS = 4
"""Inputs of which every subset is tried as those that hold samples."""

_APART = 1e-3
"""Relative difference of a sample's results, alone and in its batch, that is rounding in fp32."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a batch is drawn: the k-th sample has the mean and the size at k, over and over."""

    means: tuple[float, ...] = (0.0,)
    sizes: tuple[float, ...] = (1.0,)


DRAWS = (
    Draw(),
    Draw(means=(1.0, -1.0)),
    Draw(sizes=(8.0, 0.125)),
    Draw(means=(-4.0, 4.0, 0.0)),
    Draw(means=(0.5, 0.0), sizes=(0.01, 1.0)),
    # Alike in sign: all rows that a condition may pick, and none.
    Draw(means=(3.0,)),
    Draw(means=(-3.0,)),
)


def _mixed(tensor: Tensor, low: int) -> Tensor:
    """Return integers `low` and one more at random, the first and the last not the same."""
    made = torch.randint(low, low + 2, tensor.shape).flatten()
    made[:1], made[1:][-1:] = low, low + 1
    return made.view(tensor.shape).to(tensor.dtype)


WHOLE_NUMBERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: _mixed(tensor, 0),
    lambda tensor: _mixed(tensor, 1),
    lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype),
    lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype),
    lambda tensor: _mixed(tensor, 1).flatten().flip(0).view(tensor.shape),
)
"""Integers that indices and lengths may be (which must be above 0, or must not grow). The first of
these that a module takes are its whole numbers; others that it takes are tried, too.
"""


def input_like(
    tensor: Tensor, draw: Draw, num_samples: int, whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return random values on the CPU in the place of a tensor that a module is given."""
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape) < 0.5
    if not tensor.is_floating_point() and not tensor.is_complex():
        return whole(tensor)
    made = torch.randn(tensor.shape, dtype=_wide(tensor))
    if tensor.dim() and tensor.shape[0] % num_samples == 0 and tensor.shape[0]:
        for index, sample in enumerate(made.chunk(num_samples)):
            sample.mul_(draw.sizes[index % len(draw.sizes)])
            sample.add_(draw.means[index % len(draw.means)])
    return made.to(tensor.dtype).requires_grad_(tensor.requires_grad)


def own_like(tensor: Tensor) -> Tensor:
    """Return random values on the CPU in the place of a parameter or a buffer of a module."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        # Over the root of the last dim, so that products keep the size of what they are given.
        made = torch.randn(tensor.shape, dtype=_wide(tensor)) / tensor.shape[-1:].numel() ** 0.5
    else:  # it may be a variance
        made = 0.5 + torch.rand(tensor.shape, dtype=_wide(tensor))
    return made.to(tensor.dtype).requires_grad_(tensor.requires_grad)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex64 if tensor.is_complex() else torch.float32


Run = Callable[[Sequence[Tensor]], list[Tensor]]


def splits(values: Sequence[Tensor], num_samples: int) -> Iterator[tuple[bool, ...]]:
    """Yield which inputs may hold samples, the most first: a mask that all samples share gives
    the same in parts of itself.
    """
    may = [index for index, value in enumerate(values) if _divides(value, num_samples)]
    may = may[:_MOST_SPLIT_INPUTS]
    for chosen in sorted(product((True, False), repeat=len(may)), key=sum, reverse=True):
        split = {index for index, is_split in zip(may, chosen, strict=True) if is_split}
        if split:
            yield tuple(index in split for index in range(len(values)))


def are_apart(
    run: Run,
    values: Sequence[Tensor],
    made: Sequence[Tensor],
    split: Sequence[bool],
    num_samples: int,
) -> bool:
    """Whether each sample, given alone, gives its own part of the results."""
    if not all(_divides(tensor, num_samples) and tensor.isfinite().all() for tensor in made):
        return False
    parts = []
    for sample in range(num_samples):
        own = [
            value.detach().chunk(num_samples)[sample] if is_split else value
            for value, is_split in zip(values, split, strict=True)
        ]
        try:
            parts.append(run(own))
        except Exception:  # of sizes that do not go together
            return False
    for whole, *alone in zip(made, *parts, strict=True):
        if any((len(part) * num_samples, *part.shape[1:]) != whole.shape for part in alone):
            return False
        joined = torch.cat(alone).detach()
        if whole.dtype.is_floating_point or whole.dtype.is_complex:
            # Relative to all of the result: rounding in a small entry follows the large ones it is
            # summed with.
            size = whole.detach().abs().double().norm()
            if not (joined - whole.detach()).abs().double().norm() <= _APART * size:
                return False
        elif not torch.equal(joined, whole):
            return False
    return True


def _divides(tensor: Tensor, num_samples: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % num_samples == 0
