"""Adaptive softmax: words are taken from the batch by their cluster, of which a part may hold none.

Source: pytorch/pytorch#13273: parts of the parameters are unused in some steps on some ranks.
Right: one process's, or a refusal that names the module.
"""

import torch
from torch import nn


class Words(nn.Module):
    """In a module of its own, as its shapes depend on the words."""

    def __init__(self):
        super().__init__()
        self.clusters = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[6, 12], div_value=2.0)

    def forward(self, x, words):
        return -self.clusters(x.flatten(0, 1), words.flatten()).output.view(words.shape)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.words = Words()

    def forward(self, ids, words):
        x = self.token(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.words(x, words).mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    words = torch.randint(20, (size, 5), generator=g)
    words[: size // 2] %= 6
    return {"ids": torch.randint(20, (size, 5), generator=g), "words": words}


REFUSED = r"words|Words|Adaptive|clusters"
