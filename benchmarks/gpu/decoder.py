"""A decoder in the style of Llama, or with experts of Mixtral, of any size: for whole steps.

A model file like any other, with arguments: `load_graph(file, arguments={"width": 4096, …})`.
"""

import torch
from torch import nn
from torch.nn import functional as F

IDS = 256
"""Ids of made-up batches: fewer than any vocabulary has."""


def rotary(sequence, width):
    angles = torch.outer(
        torch.arange(sequence), 500000.0 ** (-torch.arange(0, width, 2) / width)
    ).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Gated(nn.Module):
    """The gated MLP of Llama, and each expert of Mixtral."""

    def __init__(self, width, ffn):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts of Mixtral's sizes, two for each token on average.

    Each expert takes the tokens of a sample that score highest with it (expert choice, Zhou et al.
    2022), so that shapes don't depend on values.
    """

    def __init__(self, width, ffn, count, top=2):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.gate, self.up = (
            nn.Parameter(torch.randn(count, width, ffn) * width**-0.5) for _ in range(2)
        )
        self.down = nn.Parameter(torch.randn(count, ffn, width) * ffn**-0.5)
        self.count, self.top = count, top

    def forward(self, x):
        b, s, h = x.shape
        taken = self.top * s // self.count
        scores = self.router(x).softmax(-1).transpose(1, 2)
        # (b, experts, taken): weights and places of the tokens that each expert takes.
        weights, places = scores.topk(taken, dim=-1)
        rows = places.reshape(b, self.count * taken, 1).expand(b, self.count * taken, h)
        mine = x.gather(1, rows).view(b, self.count, taken, h)
        inner = F.silu(torch.einsum("bech,ehf->becf", mine, self.gate))
        inner = inner * torch.einsum("bech,ehf->becf", mine, self.up)
        made = torch.einsum("becf,efh->bech", inner, self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(1, rows, made.reshape(b, self.count * taken, h))


class Layer(nn.Module):
    def __init__(self, width, heads, kv_heads, ffn, experts):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = Experts(width, ffn, experts) if experts else Gated(width, ffn)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, s, self.heads, self.size).transpose(1, 2)
        k = self.k(y).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(y).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, width, layers, heads, kv_heads, ffn, vocabulary, experts, sequence):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, ffn, experts) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        cos, sin = rotary(sequence, width // heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def model(width=64, layers=2, heads=4, kv_heads=2, ffn=128, vocabulary=512, experts=0, sequence=32):
    return Decoder(width, layers, heads, kv_heads, ffn, vocabulary, experts, sequence)


def batch(size, length=32):
    ids = torch.randint(0, IDS, (size, length + 1))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
