"""Stochastic depth: a layer is skipped for samples by a draw; one of them always, one never.

Source: huggingface/accelerate#1191 (and pytorch/pytorch#90171): a dropped layer has no gradient, at
which DistributedDataParallel fails. Drawn with rates 0 and 1, so that results are the same whatever
is drawn. Right: one process's.
"""

import torch
from torch import nn


class Dropped(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.rate = rate
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        kept = torch.rand(x.shape[0], 1, dtype=x.dtype, device=x.device) >= self.rate
        return x + self.down(torch.tanh(self.up(x))) * kept.to(x.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Dropped(8, rate) for rate in (0.0, 1.0, 0.0, 0.0))
        self.out = nn.Linear(8, 1)

    def forward(self, x, y):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return (self.out(x).squeeze(-1) - y).square().mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 5, generator=g).double(),
        "y": torch.randn(size, generator=g).double(),
    }
