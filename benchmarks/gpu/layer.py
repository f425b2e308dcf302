"""A transformer layer as wide as those trained on GPUs, for whole blocks: eager, compiled.

A model file like any other: `planner search benchmarks/gpu/layer.py …` works too.
"""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, SEQUENCE, LAYERS = 4096, 32, 2048, 2


class Layer(nn.Module):
    """Attention and MLP behind norms, as in GPT-2 and its successors."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, h // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Layers alone: the loss is the mean of squares, which costs nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def model():
    return Stack()


def batch(size):
    return {"x": torch.randn(size, SEQUENCE, WIDTH)}
