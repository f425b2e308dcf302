"""A small vision transformer in plain PyTorch: patches, a class token, encoder layers."""

import torch
from torch import nn
from torch.nn import functional as F

IMAGE, PATCH, HIDDEN, HEADS, LAYERS, CLASSES = 64, 8, 192, 6, 6, 100


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        patches = (IMAGE // PATCH) ** 2
        self.patch = nn.Conv2d(3, HIDDEN, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.position = nn.Parameter(torch.randn(1, patches + 1, HIDDEN) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                HIDDEN,
                HEADS,
                dim_feedforward=4 * HIDDEN,
                dropout=0.0,
                activation="gelu",
                norm_first=True,
                batch_first=True,
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, image, label):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), label)


def model():
    return VisionTransformer()


def batch(size):
    return {"image": torch.randn(size, 3, IMAGE, IMAGE), "label": torch.randint(CLASSES, (size,))}
