"""Sparse gradients of two tables, one of bags with padding, of which a part may have nothing else.

Source: pytorch/pytorch#17356 (and #87497): DistributedDataParallel fails at sparse gradients, and
gloo where a process has only padding. Right: one process's, or a refusal that names sparse.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(12, 6, padding_idx=0, sparse=True)
        self.tags = nn.EmbeddingBag(9, 6, mode="sum", sparse=True)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, item, tags, y):
        x = self.items(item).sum(1) + self.tags(tags)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.out(x).squeeze(-1) - y).square().mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    item = torch.randint(12, (size, 3), generator=g)
    item[:2] = 0
    return {
        "item": item,
        "tags": torch.randint(9, (size, 4), generator=g),
        "y": torch.randn(size, generator=g).double(),
    }


REFUSED = r"sparse"
