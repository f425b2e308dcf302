"""Sigmoid focal loss over all anchors, divided by the number of those that hold an object.

Source: tianzhi0549/FCOS#228 (and open-mmlab/mmdetection#5988): each device divided by its own
positives until their number was averaged over devices. Right: one process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(3))
        self.classes = nn.Conv1d(6, 2, 1)
        self.centre = nn.Conv1d(6, 1, 1)

    def forward(self, x, objects, centre):
        x = torch.relu(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.classes(x)
        positive = objects.amax(1)
        count = positive.sum().clamp(min=1.0)
        bce = F.binary_cross_entropy_with_logits(logits, objects, reduction="none")
        p = logits.sigmoid()
        p_true = p * objects + (1 - p) * (1 - objects)
        alpha = 0.25 * objects + 0.75 * (1 - objects)
        focal = (alpha * (1 - p_true) ** 2 * bce).sum() / count
        near = F.binary_cross_entropy_with_logits(self.centre(x)[:, 0], centre, reduction="none")
        return focal + (near * positive).sum() / count


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    rate = torch.tensor([0.9, 0.0, 0.1, 0.0, 0.5, 0.9, 0.2, 0.1])[:size]
    objects = torch.rand(size, 2, 7, generator=g) < rate[:, None, None]
    return {
        "x": torch.randn(size, 3, 7, generator=g).double(),
        "objects": objects.double(),
        "centre": torch.rand(size, 7, generator=g).double(),
    }
