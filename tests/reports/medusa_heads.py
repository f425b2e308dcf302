"""Three heads that guess the next tokens, each with its own shifted mask and its own mean, frozen
trunk below.

Source: SafeAILab/EAGLE#340: a mean over all places, or a sum over the mask's; the two weigh samples
otherwise. Right: one process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Head(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.inner, self.out = nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, x):
        return self.out(x + F.silu(self.inner(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8).requires_grad_(False)
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).requires_grad_(False)
        self.heads = nn.ModuleList(Head(8, 16) for _ in range(3))

    def forward(self, ids, mask):
        x = self.token(ids)
        for layer in self.trunk:
            x = x + torch.tanh(layer(x))
        losses = []
        for ahead, head in enumerate(self.heads, 1):
            log_probs = head(x)[:, :-ahead].log_softmax(-1)
            nll = -log_probs.gather(-1, ids[:, ahead:, None]).squeeze(-1)
            counted = mask[:, ahead:]
            losses.append(0.8**ahead * (nll * counted).sum() / counted.sum().clamp(min=1))
        return torch.stack(losses).sum()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 7, 2, 0, 5, 7, 1, 3])[:size]
    return {
        "ids": torch.randint(16, (size, 8), generator=g),
        "mask": (torch.arange(8) > 7 - lengths[:, None]).double(),
    }
