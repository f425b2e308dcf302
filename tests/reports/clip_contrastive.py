"""Pictures and texts of a batch, each against all others, with a learned scale.

Source: ArrowLuo/CLIP4Clip#69: with several GPUs or accumulation a sample meets the negatives of
its own part alone. Right: one process's, or a line that says samples are compared.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.normalize(self.second(torch.tanh(self.first(x))), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pictures, self.texts = Tower(6), Tower(4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, picture, text):
        a, b = self.pictures(picture), self.texts(text)
        logits = self.scale.exp() * a @ b.T
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "picture": torch.randn(size, 6, generator=g).double(),
        "text": torch.randn(size, 4, generator=g).double(),
    }


REFUSED = r"compared with each other|computed across samples"
