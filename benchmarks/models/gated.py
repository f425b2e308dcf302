"""A decoder in the style of Llama, plain PyTorch: RMSNorm, rotary positions, gated MLP."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, SEQUENCE, HIDDEN, HEADS, LAYERS = 2048, 96, 192, 6, 5


def rotary(sequence, width):
    angles = torch.outer(
        torch.arange(sequence), 10000.0 ** (-torch.arange(0, width, 2) / width)
    ).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, s, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        cos, sin = rotary(SEQUENCE, HIDDEN // HEADS)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def model():
    return Decoder()


def batch(size):
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
