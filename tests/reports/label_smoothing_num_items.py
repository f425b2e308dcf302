"""The label smoother of a trainer: sums over tokens that are not padding, divided by their number.

Source: huggingface/transformers#46731: with gradient accumulation the smoother divided by each
microbatch's own tokens, and gradients grew. Right: one process's loss and gradients.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 20)

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        log_probs = -self.head(x)[:, :-1].log_softmax(-1)
        labels = labels[:, 1:].unsqueeze(-1)
        padding = labels.eq(-100)
        nll = log_probs.gather(-1, labels.clamp(min=0)).masked_fill(padding, 0.0)
        smoothed = log_probs.sum(-1, keepdim=True).masked_fill(padding, 0.0)
        active = padding.numel() - padding.long().sum()
        return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log_probs.shape[-1])


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (size, 7), generator=g)
    counts = torch.tensor([6, 1, 2, 0, 5, 1, 6, 3])[:size]
    return {"ids": ids, "labels": ids.masked_fill(torch.arange(7) > counts[:, None], -100)}
