"""Many tasks, most labels missing: each task's mean over the samples that have its label, then the
mean of tasks.

Source: NVIDIA-BioNeMo/KERMT#21 (and datamol-io/graphium#413): normalised by each rank's own
labels, rare tasks count too little. Right: one process's.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.tasks = nn.Linear(8, 5)

    def forward(self, x, targets):
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        known = torch.isfinite(targets).to(x.dtype)
        error = (self.tasks(x) - torch.nan_to_num(targets)) ** 2 * known
        of_task = error.sum(0) / known.sum(0).clamp(min=1.0)
        return of_task.mean()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    targets = torch.randn(size, 5, generator=g).double()
    rate = torch.tensor([0.0, 0.3, 0.6, 0.8, 0.9])
    missing = torch.rand(size, 5, generator=g) < rate
    return {
        "x": torch.randn(size, 6, generator=g).double(),
        "targets": targets.masked_fill(missing, float("nan")),
    }
