"""Low-rank parts beside frozen weights, some layers frozen whole; means over the labels that count.

Source: facebookresearch/fairscale#643: frozen weights inside a sharded model fail in the backward.
Right: one process's, and frozen weights as they were.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Adapted(nn.Module):
    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = (
            nn.Linear(inputs, rank, bias=False),
            nn.Linear(rank, outputs, bias=False),
        )

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = Adapted(width, 3 * width, 2), nn.Linear(width, width)
        self.out.requires_grad_(False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(8) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (size, 6), generator=g)
    counts = torch.tensor([6, 1, 0, 2, 5, 1, 6, 3])[:size]
    return {"ids": ids, "labels": ids.masked_fill(torch.arange(6) >= counts[:, None], -100)}
