"""Masked words and the order of sentences: a mean over the masked tokens of a batch, and one over
its samples.

Source: mlcommons/training#498 (and NVIDIA-BioNeMo/bionemo-recipes#900): what a sequence counts for
depends on which batch it is in. Right: one process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))
        self.words, self.order = nn.Linear(8, 16), nn.Linear(8, 2)

    def forward(self, ids, labels, next_sentence_label):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        masked = F.cross_entropy(self.words(x).view(-1, 16), labels.view(-1))
        return masked + F.cross_entropy(self.order(x[:, 0]), next_sentence_label)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (size, 6), generator=g)
    counts = torch.tensor([6, 1, 0, 2, 5, 1, 6, 3])[:size]
    return {
        "ids": ids,
        "labels": ids.masked_fill(torch.arange(6) >= counts[:, None], -100),
        "next_sentence_label": torch.randint(2, (size,), generator=g),
    }
