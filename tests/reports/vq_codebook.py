"""Vectors replaced by the nearest of a codebook, gradients straight through; the codebook follows
the vectors that chose each code.

Source: espnet/espnet#6284 (and samxuxiang/hnc-cad#3): each worker moved its codebook by its own
batch. Right: one process's, or a line that says the buffer is written from samples.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Codebook(nn.Module):
    def __init__(self, codes, width):
        super().__init__()
        self.register_buffer("vectors", torch.randn(codes, width))
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", torch.randn(codes, width))

    def forward(self, x):
        distance = ((x.unsqueeze(-2) - self.vectors) ** 2).sum(-1)
        hot = F.one_hot(distance.argmin(-1), self.vectors.shape[0]).to(x.dtype)
        made = hot @ self.vectors
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(0.1 * hot.sum((0, 1)))
            self.sums.mul_(0.9).add_(0.1 * torch.einsum("btc,btw->cw", hot, x))
            self.vectors.copy_(self.sums / self.sizes[:, None])
        return x + (made - x).detach(), ((made.detach() - x) ** 2).mean()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.codebook = Codebook(6, 4)
        self.decode = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x):
        made, commitment = self.codebook(self.encode(x))
        return F.mse_loss(self.decode(made), x) + 0.25 * commitment


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(size, 3, 5, generator=g).double()}


REFUSED = r"buffers? (is|are) written from samples|codebook"
