"""Features that a classifier of domains can't tell apart, by a reversed gradient; only the source
domain has labels, and its mean is over these.

Source: CuthbertCai/pytorch_DANN#13 (the reversal is a function of its own). Right: one process's,
or a line that names the function, of which nothing is known until it is accepted.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.classes, self.domains = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x, y, domain):
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        known = F.cross_entropy(self.classes(x), y, ignore_index=-1)
        return known + F.cross_entropy(self.domains(Reversed.apply(x, 0.3)), domain)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    domain = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])[:size]
    y = torch.randint(4, (size,), generator=g)
    return {
        "x": torch.randn(size, 5, generator=g).double(),
        "y": y.masked_fill(domain == 1, -1),
        "domain": domain,
    }


REFUSED = r"Reversed"
