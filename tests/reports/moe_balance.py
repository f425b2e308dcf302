"""Routed experts with a loss that balances them: shares of tokens times mean probabilities.

Source: NVIDIA/Megatron-LM#3672 (and NVIDIA-NeMo/Automodel#3359): the balance taken over a part of
the batch is another than over all of it, and its scale changed with the number of parts.
Right: one process's, or a line that names the mean over samples.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Routed(nn.Module):
    def __init__(self, width, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, width) / 4)

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        chosen = probabilities.argmax(-1)
        hot = F.one_hot(chosen, probabilities.shape[-1]).to(x.dtype)
        made = torch.einsum("bti,eio,bte->bto", x, self.up, hot * probabilities)
        shares, means = hot.mean((0, 1)), probabilities.mean((0, 1))
        return x + torch.tanh(made), probabilities.shape[-1] * (shares * means).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Routed(8) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, ids, labels):
        x, balance = self.token(ids), 0.0
        for layer in self.layers:
            x, one = layer(x)
            balance = balance + one
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (size, 6), generator=g)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


REFUSED = r"mean|argmax|one_hot|computed across samples"
