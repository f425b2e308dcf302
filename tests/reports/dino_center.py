"""A student learns a frozen teacher's outputs, less a centre that moves with their mean.

Source: facebookresearch/dino#102: whether the centre moves at every accumulation step.
Right: one process's, or a line that says the buffer is written from samples.
"""

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Tower(), Tower()
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, one, other):
        with torch.no_grad():
            target = self.teacher(one)
            probabilities = ((target - self.center) / 0.2).softmax(-1)
        loss = -(probabilities * (self.student(other) / 0.5).log_softmax(-1)).sum(-1).mean()
        with torch.no_grad():
            self.center.mul_(0.9).add_(0.1 * target.mean(0, keepdim=True))
        return loss


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    one = torch.randn(size, 5, generator=g).double() + torch.arange(size)[:, None]
    return {"one": one, "other": one + 0.1 * torch.randn(size, 5, generator=g).double()}


REFUSED = r"buffers? (is|are|center is) written"
