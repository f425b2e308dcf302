"""Soft dice of a segmentation, sums taken over the whole batch, beside a cross-entropy.

Source: qubvel-org/segmentation_models.pytorch#712: the loss of a batch is not the mean of those of
its images. Right: one process's, or a line that says the loss is divided by a sum.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, picture, classes):
        x = torch.relu(self.stem(picture))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        p = logits.softmax(1)
        hot = F.one_hot(classes, 3).movedim(-1, 1).to(p.dtype)
        shared = (p * hot).sum((0, 2, 3))
        sizes = (p + hot).sum((0, 2, 3))
        dice = (2 * shared + 1) / (sizes + 1)
        return 1 - dice.mean() + F.cross_entropy(logits, classes)


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    classes = torch.randint(3, (size, 4, 4), generator=g)
    return {
        "picture": torch.randn(size, 2, 4, 4, generator=g).double(),
        "classes": classes * (torch.arange(size) % 3 > 0)[:, None, None],
    }


REFUSED = r"sum|div|computed across samples"
