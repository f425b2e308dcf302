"""A tiny model whose parameters' first dims are smaller than the ranks that ZeRO shards over."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.builders import PlainGPT

EXPERTS = 3


class _Experts(nn.Module):
    """Every token goes through all of three experts, weighted by the router; beside their stacked
    matrices a bias of each, which no number of ranks above three can cut without padding.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS)
        self.up = nn.Parameter(0.2 * torch.randn(EXPERTS, hidden, width))
        self.down = nn.Parameter(0.2 * torch.randn(EXPERTS, width, hidden))

    def forward(self, x):
        rows = x.flatten(0, 1)
        shares = self.router(rows).softmax(-1)
        inner = F.gelu(torch.bmm(rows.expand(EXPERTS, -1, -1), self.up))
        made = torch.bmm(inner, self.down) * shares.t().unsqueeze(-1)
        return x + made.sum(0).view_as(x)


class StackedGPT(PlainGPT):
    """Two layers, each followed by experts."""

    def __init__(self, width: int = 12) -> None:
        super().__init__(layers=2)
        hidden = self.norm.weight.numel()
        self.layers = nn.ModuleList(
            nn.Sequential(each, _Experts(hidden, width)) for each in self.layers
        )
