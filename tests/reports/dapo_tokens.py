"""A clipped policy loss over all tokens of the answers in a batch, divided by their number.

Source: huggingface/trl#5619 (and modelscope/ms-swift#10117): the sum over a microbatch was divided
once too often. Right: one process's loss and gradients.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids, answer, advantages, old):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        log_probs = self.head(x)[:, :-1].log_softmax(-1)
        per_token = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (per_token - old[:, 1:]).exp()
        clipped = ratio.clamp(0.8, 1.28) * advantages[:, None]
        loss = -torch.min(ratio * advantages[:, None], clipped)
        mask = answer[:, 1:]
        return (loss * mask).sum() / mask.sum().clamp(min=1.0)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 6, 2, 1, 5, 6, 0, 3])[:size]
    return {
        "ids": torch.randint(16, (size, 8), generator=g),
        "answer": (torch.arange(8) > 7 - lengths[:, None]).double(),
        "advantages": torch.randn(size, generator=g).double(),
        "old": -2.7 + 0.2 * torch.randn(size, 8, generator=g).double(),
    }
