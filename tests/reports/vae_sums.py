"""A variational autoencoder: the sums of both parts over the batch, divided by its samples.

Source: Lightning-AI/pytorch-lightning#6789: two devices do not give what one does on the same
batch. The noise comes with the batch. Right: one process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.decode = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x, noise):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + noise * (0.5 * log_variance).exp()
        bce = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="sum")
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return (bce + 0.5 * kl) / x.size(0)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.rand(size, 6, generator=g).double(),
        "noise": torch.randn(size, 4, generator=g).double(),
    }
