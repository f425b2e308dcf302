"""Cross-entropy with class weights, which is divided by the weights of the batch's own labels, and
a second head without any.

Source: pytorch/pytorch#72047: with gradient accumulation the weighted mean is another. Right: one
process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rare, self.plain = nn.Linear(8, 4), nn.Linear(8, 3)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.05, 1.0, 6.0, 2.0]))

    def forward(self, x, rare, plain):
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.criterion(self.rare(x), rare) + 0.5 * F.cross_entropy(self.plain(x), plain)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 5, generator=g).double(),
        "rare": torch.tensor([0, 0, 0, 2, 1, 2, 0, 3])[:size],
        "plain": torch.randint(3, (size,), generator=g),
    }
