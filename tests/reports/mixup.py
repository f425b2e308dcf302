"""Mixup in the forward: each sample with the one at its place in the reversed batch.

Source: tensorpack/tensorpack#775: with two GPUs the permutation is of each one's own half. Right:
one process's, or a line that names the flip.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x, y, share):
        share = share[:, None]
        x = torch.tanh(self.stem(share * x + (1 - share) * x.flip(0)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        one = F.cross_entropy(self.head(x), y, reduction="none")
        other = F.cross_entropy(self.head(x), y.flip(0), reduction="none")
        return (share[:, 0] * one + (1 - share[:, 0]) * other).mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 5, generator=g).double(),
        "y": torch.randint(4, (size,), generator=g),
        "share": torch.full((size,), 0.7).double(),
    }


REFUSED = r"flip"
