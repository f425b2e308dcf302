"""Models whose losses compare samples with each other, or take statistics over all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES = 8, 4


class Tower(nn.Module):
    """Features of a sample."""

    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 16)
        self.third = nn.Linear(16, out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.third(F.relu(self.second(x)))


class Clip(nn.Module):
    """Two towers; each sample's features shall be nearest to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = F.normalize(self.left(x), dim=-1)
        right = F.normalize(self.right(y), dim=-1)
        logits = self.scale.exp() * left @ right.T
        own = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class SimClr(Tower):
    """Two views of each sample in one batch, each the other's positive."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = len(x)
        z = F.normalize(torch.cat([super().forward(x), super().forward(y)]), dim=1)
        similar = z @ z.T / 0.5
        itself = torch.eye(2 * n, dtype=torch.bool, device=x.device)
        other = torch.cat(
            [torch.arange(n, 2 * n, device=x.device), torch.arange(n, device=x.device)]
        )
        return F.cross_entropy(similar.masked_fill(itself, -1e9), other)


class VicReg(Tower):
    """Invariance of each sample; variance and covariance over all of them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = super().forward(x), super().forward(y)
        spread = sum(F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean() for z in (a, b))
        return 25 * F.mse_loss(a, b) + 25 * spread + _covariance(a) + _covariance(b)


def _covariance(z: Tensor) -> Tensor:
    centred = z - z.mean(0)
    found = centred.T @ centred / (len(z) - 1)
    return (found - torch.diag(torch.diagonal(found))).pow(2).sum() / z.shape[1]


class Barlow(Tower):
    """Cross-correlation of two views, over the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = super().forward(x), super().forward(y)
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        found = a.T @ b / len(x)
        own = torch.diagonal(found)
        return (own - 1).pow(2).sum() + 0.01 * (found.pow(2).sum() - own.pow(2).sum())


class Routed(nn.Module):
    """Experts, balanced by the product of two means over the batch in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        balance = x.new_zeros(())
        for layer in self.layers:
            x, own = layer(x)
            balance = balance + own
        return F.mse_loss(self.head(x), y[:, :CLASSES]) + 0.1 * balance


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, CLASSES)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        chosen = shares.argmax(-1)
        counts = F.one_hot(chosen, CLASSES).to(shares.dtype).mean(0)
        weight = shares.gather(1, chosen[:, None])
        return x + weight * self.down(torch.tanh(self.up(x))), CLASSES * (
            counts * shares.mean(0)
        ).sum()


class RootMean(Tower):
    """A root of a mean over samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sqrt(F.mse_loss(super().forward(x), y[:, :6]))


class Distances(Tower):
    """Distances of all pairs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        apart = torch.cdist(super().forward(x), super().forward(y))
        own = torch.eye(len(x), device=x.device)
        return (F.softplus(apart) * own).sum() / len(x) + 0.01 * apart.mean()


class Centred(Tower):
    """Layers that subtract the mean of the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        x = F.relu(self.second(F.relu(x - x.mean(0))))
        return (self.third(x - x.mean(0)) - y[:, :6]).pow(2).mean()


class Attending(Tower):
    """Samples attend to each other in the middle."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        asked = self.second(x)
        return (self.third((asked @ asked.T).softmax(-1) @ x) - y[:, :6]).pow(2).mean()


MODELS: dict[str, type[nn.Module]] = {
    model.__name__: model
    for model in (
        Clip,
        SimClr,
        VicReg,
        Barlow,
        Routed,
        RootMean,
        Distances,
        Centred,
        Attending,
    )
}


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64)
    return x, y
