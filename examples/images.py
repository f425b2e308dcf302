"""A small convolution net that tells squares, discs, crosses and stripes apart.

Images are drawn from their number, so that no data set is needed. This file is both the model and
the training script:

    planner search examples/images.py --gpus 2 --global-batch 8
    planner launch --keep run --save-every 20 plan.json examples/images.py
    planner convert run weights        # weights/model.safetensors, for Net().load_state_dict
"""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, SIZE, WIDTH = 4, 16, 32
STEPS, SAMPLES = 60, 256


class Block(nn.Module):
    """A residual block with GroupNorm, which computes on each sample alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)
        self.up = nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1)
        self.down = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Images in, mean loss of their classes out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def scores(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    def forward(self, images, labels):
        return F.cross_entropy(self.scores(images), labels)


def model():
    return Net()


def batch(size):
    """(images, labels): (size, 3, SIZE, SIZE) floats and (size,) int64."""
    return torch.randn(size, 3, SIZE, SIZE), torch.randint(CLASSES, (size,))


class Shapes(torch.utils.data.Dataset):
    """An image of a shape somewhere in noise, and which shape it is."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        label = index % CLASSES
        x, y = torch.rand(2, 1, 1, generator=own) * SIZE / 2 - SIZE / 4
        row = torch.arange(SIZE) - SIZE / 2
        down, across = row[:, None] - y, row[None, :] - x
        far = torch.maximum(down.abs(), across.abs())
        inside = (
            far < 4,
            down**2 + across**2 < 16,
            (torch.minimum(down.abs(), across.abs()) < 1) & (far < 4),
            (down % 4 < 2) & (far < 4),
        )[label]
        noise = torch.randn(3, SIZE, SIZE, generator=own)
        return inside + noise / 4, torch.tensor(label)


def main():
    import planner
    import training

    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    engine = planner.apply("plan.json", network, optimizer=optimizer)
    training.train(engine, optimizer, Shapes(), STEPS)


if __name__ == "__main__":
    main()
