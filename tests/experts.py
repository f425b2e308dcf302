"""A tiny decoder with routed experts, in plain PyTorch: matrices of all of them in products of
runs, which also take fp64, or modules of their own in a loop.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.builders import HIDDEN, SEQUENCE, VOCABULARY, PlainAttention

WIDTH = 24


class RoutedExperts(nn.Module):
    """Experts of which each token takes `per_token`; `bias` adds a bias by expert."""

    def __init__(
        self, number: int = 4, per_token: int = 2, *, bias: bool = False, shared=True, width=WIDTH
    ):
        super().__init__()
        import transformers.integrations.moe  # noqa: F401  (the product of runs in any dtype)

        self.multiplied = torch.ops.transformers.grouped_mm_fallback

        self.number, self.per_token = number, per_token
        self.router = nn.Linear(HIDDEN, number, bias=False)
        self.up = nn.Parameter(torch.randn(number, HIDDEN, 2 * width) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(number, width, HIDDEN) / width**0.5)
        self.up_bias = nn.Parameter(torch.randn(number, 2 * width) / 10) if bias else None
        self.shared = nn.Linear(HIDDEN, HIDDEN) if shared else None

    def forward(self, x):
        shape = x.shape
        rows = x.reshape(-1, shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(self.per_token)
        experts, order = chosen.reshape(-1).sort(stable=True)
        moved = rows[order // self.per_token]
        counts = torch.histc(experts.float(), self.number, 0, self.number - 1)
        ends = counts.to(torch.int32).cumsum(0, dtype=torch.int32)
        both = self.multiplied(moved, self.up, ends)
        if self.up_bias is not None:
            both = both + self.up_bias[experts]
        gate, up = both.chunk(2, -1)
        made = self.multiplied(F.silu(gate) * up, self.down, ends)
        made = made * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        found = made[back].view(*chosen.shape, -1).sum(1).view(shape)
        return found if self.shared is None else found + self.shared(x)


class ExpertModules(nn.Module):
    """Experts as transformers 4 has them: modules, gone through by number, those alone that rows
    were routed to. No row chooses the last of them where it is `shut`.
    """

    def __init__(self, number: int = 4, per_token: int = 2, *, bias: bool = False, shut=False):
        super().__init__()
        self.number, self.per_token, self.shut = number, per_token, shut
        self.router = nn.Linear(HIDDEN, number, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(HIDDEN, WIDTH, bias=bias), nn.SiLU(), nn.Linear(WIDTH, HIDDEN, bias=bias)
            )
            for _ in range(number)
        )

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows)
        if self.shut:
            scores = scores - 1e9 * (torch.arange(self.number, device=x.device) == self.number - 1)
        weights, chosen = scores.softmax(-1).topk(self.per_token)
        made = torch.zeros_like(rows)
        mask = F.one_hot(chosen, num_classes=self.number).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, which = torch.where(mask[number].squeeze(0))
            of_expert = self.experts[number](rows[None, which].reshape(-1, rows.shape[1]))
            made.index_add_(0, which, of_expert * weights[which, slot, None])
        return made.view_as(x)


class RoutedLayer(nn.Module):
    def __init__(self, kind=RoutedExperts, **experts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.experts = PlainAttention(), kind(**experts)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class RoutedGPT(nn.Module):
    """A decoder of routed layers; its batch is `builders.gpt_batch`."""

    def __init__(self, layers: int = 2, **experts):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(RoutedLayer(**experts) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
