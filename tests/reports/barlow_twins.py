"""Two views, normalised over the batch; their correlation over the batch is made the identity.

Source: lightly-ai/lightly#1977: with the correlation gathered, gradients were too small by the
number of ranks. Right: one process's, or a line that names the mean over samples.
"""

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower()

    def forward(self, one, other):
        a, b = self.tower(one), self.tower(other)
        a = (a - a.mean(0)) / (a.std(0) + 1e-4)
        b = (b - b.mean(0)) / (b.std(0) + 1e-4)
        c = a.T @ b / len(a)
        on = (c.diagonal() - 1).square().sum()
        return on + 0.01 * (c.square().sum() - c.diagonal().square().sum())


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    one = torch.randn(size, 5, generator=g).double()
    return {"one": one, "other": one + 0.3 * torch.randn(size, 5, generator=g).double()}


REFUSED = r"computed across samples|mean|std"
