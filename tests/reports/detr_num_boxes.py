"""Detection as a set: L1 of boxes over their number in the batch, and classes weighed down where
there is no object.

Source: facebookresearch/detr#354: the part of classes is normalised on each device and that of
boxes over all, so results depend on the number of devices. Right: one process's.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.out(torch.relu(self.mix(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.picture = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
        self.classes, self.boxes = nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("class_weight", torch.tensor([1.0, 1.0, 1.0, 0.1]))

    def forward(self, picture, target_classes, target_boxes):
        x = self.queries + self.picture(picture)[:, None]
        for layer in self.layers:
            x = layer(x)
        of_class = F.cross_entropy(
            self.classes(x).transpose(1, 2), target_classes, weight=self.class_weight
        )
        has_box = (target_classes != 3).to(x.dtype)
        count = has_box.sum().clamp(min=1)
        l1 = F.l1_loss(self.boxes(x).sigmoid(), target_boxes, reduction="none").sum(-1)
        return of_class + 5 * (l1 * has_box).sum() / count


def model():
    torch.manual_seed(0)
    return Model().double()


def batch(size):
    g = torch.Generator().manual_seed(1)
    classes = torch.randint(3, (size, 5), generator=g)
    objects = torch.tensor([5, 0, 1, 1, 4, 0, 5, 2])[:size]
    return {
        "picture": torch.randn(size, 6, generator=g).double(),
        "target_classes": classes.masked_fill(torch.arange(5) >= objects[:, None], 3),
        "target_boxes": torch.rand(size, 5, 4, generator=g).double(),
    }
