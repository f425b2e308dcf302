"""Lovasz hinge: the pixels of the whole batch, sorted by their errors.

Source: microsoft/InnerEye-DeepLearning#504 (a loss of segmentation that is of each GPU's part
alone), bermanmaxim/LovaszSoftmax#26 (small batches do not learn). Right: one process's, or a line
that names the sort.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(6, 1, 1)

    def forward(self, picture, mask):
        x = torch.relu(self.stem(picture))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits, truth = self.head(x).flatten(), mask.flatten()
        errors = 1 - logits * (2 * truth - 1)
        errors, order = errors.sort(descending=True)
        truth = truth[order]
        shared = truth.sum() - truth.cumsum(0)
        union = truth.sum() + (1 - truth).cumsum(0)
        jaccard = 1 - shared / union
        steps = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        return (torch.relu(errors) * steps).sum()


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    rate = torch.tensor([0.9, 0.1, 0.5, 0.2, 0.8, 0.1, 0.3, 0.6])[:size]
    mask = torch.rand(size, 3, 3, generator=g) < rate[:, None, None]
    return {
        "picture": torch.randn(size, 2, 3, 3, generator=g).double(),
        "mask": mask.double(),
    }


REFUSED = r"sort|cumsum"
