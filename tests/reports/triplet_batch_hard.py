"""Each sample with the farthest of its own identity and the nearest of another in the batch.

Source: JDAI-CV/fast-reid#458: mined within each GPU alone. Right: one process's, or a line that
says samples are compared.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x, identity):
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.out(x)
        distance = ((x[:, None] - x[None]) ** 2).sum(-1).add(1e-6).sqrt()
        same = identity[:, None] == identity[None]
        farthest = distance.masked_fill(~same, -1e9).amax(1)
        nearest = distance.masked_fill(same, 1e9).amin(1)
        return F.softplus(farthest - nearest).mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 5, generator=g).double(),
        "identity": torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])[:size],
    }


REFUSED = r"compared with each other|computed across samples"
