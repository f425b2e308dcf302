"""Diffusion: a step drawn for each sample, noise added by it, and losses weighed by min-SNR.

Source: kohya-ss/sd-scripts#308 (one sample's step has too large a loss). The step is drawn from a
range of one, so that results are the same whatever is drawn. Right: one process's.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.time = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Linear(1, width),
        )

    def forward(self, x, t):
        return x + self.down(torch.tanh(self.up(x + self.time(t))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.05, 10))
        self.stem, self.out = nn.Linear(5, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, x, noise, first):
        step = first + torch.randint(0, 1, first.shape, device=first.device)
        kept = self.kept[step][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        t = step[:, None].to(x.dtype) / 10
        y = self.stem(noisy)
        for layer in self.layers:
            y = layer(y, t)
        snr = self.kept[step] / (1 - self.kept[step])
        weight = snr.clamp(max=5.0) / snr
        return ((self.out(y) - noise).square().mean(1) * weight).mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(size, 5, generator=g).double(),
        "noise": torch.randn(size, 5, generator=g).double(),
        "first": torch.randint(10, (size,), generator=g),
    }
