"""Numbers of rows or classes that are beyond their range, which a mask of a rank's own would hide.

PyTorch's lookups and losses end with an error there. Where ranks divide rows or classes, a number
that no rank has looks as one that another has: a label would cost nothing, an id have zeros for an
embedding, and a training go on otherwise than in one process.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

A_LABEL = "a label of a loss of classes"


def beyond(numbers: Tensor, count: int, *, what: str, ignored: int | None = None) -> Tensor:
    """Return where `numbers` are none of 0 to `count` - 1; of those `ignored` nothing is said.

    Callers write NaN there, so that a device need not wait for an answer: the check of a step's
    values finds it. Raises IndexError on the host, whose values are at hand, and where a step is
    run again to be looked at.
    """
    mask = numbers.clamp(0, count - 1) != numbers
    if torch.compiler.is_compiling() or isinstance(numbers, FakeTensor):
        return mask
    if numbers.device.type == "cpu" or torch.is_anomaly_enabled():
        told = mask if ignored is None else mask & (numbers != ignored)
        if told.any():
            but = "" if ignored is None else f" ({ignored} is ignored)"
            raise IndexError(
                f"{what} is {numbers[told][0].item()}, and there are 0 to {count - 1}{but}; give "
                "numbers in that range, or make the model's larger"
            )
    return mask
