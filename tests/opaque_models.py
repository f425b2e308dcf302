"""Models whose course depends on values, each with a part that no graph can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH = 8, 4


class LoopedExperts(nn.Module):
    """A Python loop over the experts that were chosen. The last is never chosen.

    Each takes `most` rows, which no capture tells in sorted runs of rows.
    """

    def __init__(self, num: int = 4, top: int = 2, most: int = 1000) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num)
        )
        self.top, self.most = top, most
        self.register_buffer("shut", torch.tensor([0.0] * (num - 1) + [-1e9]))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = self.router(rows) + self.shut.clamp(max=0).to(x.dtype)
        weights, chosen = scores.softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            which, slot = torch.where(chosen == index)
            if which.numel() == 0:
                continue
            which, slot = which[: self.most], slot[: self.most]
            out.index_add_(0, which, expert(rows[which]) * weights[which, slot].unsqueeze(-1))
        return out.view_as(x)


class PickedRows(nn.Module):
    """Rows that a condition picks go through a layer: boolean indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        picked = x.sum(-1) > 0
        out = x.clone()
        out[picked] = torch.tanh(self.layer(x[picked]))
        return out


class WhileSmall(nn.Module):
    """As many turns as each sample needs (`.item()`), and a count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, most: int = 3) -> tuple[Tensor, Tensor]:
        made, turns = [], []
        for sample in x:
            count = 0
            while count < most and sample.norm().item() < 3:
                sample = sample + torch.tanh(self.layer(sample))
                count += 1
            made.append(sample)
            turns.append(count)
        return torch.stack(made), torch.tensor(turns, device=x.device)


class DrawingExperts(LoopedExperts):
    """The same with dropout in it, and skipped where a draw is small."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.1:
            return x
        return F.dropout(super().forward(F.dropout(x, 0.1, self.training)), 0.1, self.training)


class TiedExperts(LoopedExperts):
    """The same with an expert in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[2] = self.experts[0]


class IfMean(nn.Module):
    """A choice by the mean over the batch: samples are not apart."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.mean() > 0 else -x


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        made = self.part(torch.tanh(self.up(self.norm(x))))
        return x + (made if isinstance(made, Tensor) else made[0] + 0.1 * made[1][:, None, None])


class Chain(nn.Module):
    """A few blocks with such a part in each."""

    def __init__(self, part: Callable[[], nn.Module], num: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Block(part()) for _ in range(num))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


PARTS: dict[str, Callable[[], nn.Module]] = {
    "loop over experts": LoopedExperts,
    "boolean indexing": PickedRows,
    "item in a while loop": WhileSmall,
    "draws": DrawingExperts,
    "an expert in two places": TiedExperts,
}
"""Those that compute samples apart."""


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(20, (size, LENGTH)), torch.randint(20, (size, LENGTH))
