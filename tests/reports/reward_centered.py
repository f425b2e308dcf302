"""A reward model on pairs of answers, with a margin, its rewards kept near zero.

Source: huggingface/trl#1932 (centre of rewards). Chosen and rejected are tensors of one sample.
Right: one process's loss and gradients.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.score = nn.Linear(8, 1, bias=False)

    def rewards(self, ids, lengths):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.score(x).squeeze(-1)
        return scores[torch.arange(len(ids), device=ids.device), lengths - 1]

    def forward(self, chosen, chosen_length, rejected, rejected_length, margin):
        a, b = self.rewards(chosen, chosen_length), self.rewards(rejected, rejected_length)
        loss = -F.logsigmoid(a - b - margin).mean()
        return loss + 0.01 * ((a + b) ** 2).mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "chosen": torch.randint(16, (size, 6), generator=g),
        "chosen_length": torch.randint(1, 7, (size,), generator=g),
        "rejected": torch.randint(16, (size, 5), generator=g),
        "rejected_length": torch.randint(1, 6, (size,), generator=g),
        "margin": torch.rand(size, generator=g).double(),
    }
