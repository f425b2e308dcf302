"""A tiny model with tensors of no elements, as configurations of none of something make them."""

from __future__ import annotations

import torch
from torch import nn

from tests.builders import PlainGPT


class _Prefixed(nn.Module):
    """A layer behind prefix tokens of its own, of which there may be none."""

    def __init__(self, layer: nn.Module, count: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.prefix = nn.Parameter(torch.zeros(count, width))
        self.register_buffer("shifts", torch.zeros(count, width))

    def forward(self, x):
        first = (self.prefix + self.shifts).expand(len(x), -1, -1)
        return self.layer(torch.cat([first, x], 1))[:, len(self.prefix) :]


class EmptyGPT(PlainGPT):
    """Layers without prefix tokens: one of its own, two that share theirs, one that is frozen; a
    linear layer of no inputs; and a parameter that the forward does not use.
    """

    def __init__(self) -> None:
        super().__init__(layers=4)
        width = self.norm.weight.numel()
        self.layers = nn.ModuleList(_Prefixed(each, 0, width) for each in self.layers)
        self.layers[3].prefix = self.layers[0].prefix
        self.layers[2].prefix.requires_grad_(False)
        self.extra = nn.Parameter(torch.zeros(width, 0))
        self.unused = nn.Parameter(torch.zeros(3, 0))

    def forward(self, ids, labels):
        nothing = ids.new_zeros((*ids.shape, 0), dtype=self.extra.dtype) @ self.extra.T
        x = self.token(ids) + self.position(torch.arange(ids.shape[1])) + nothing
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
