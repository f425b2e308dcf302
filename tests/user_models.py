"""Odd but realistic models of users, with optimizers, that plans train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """How a user makes a model, its loss from its outputs, its optimizer and the schedule of it."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda module: AdamW(
        module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1
    )
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None


def batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 6, WIDTH), "y": torch.randn(size, 6, WIDTH)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Four layers; `each` is what is done with one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def each(self, index: int, x: Tensor) -> Tensor:
        return self.layers[index](x)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = []
        for index in range(4):
            x = self.each(index, x)
            hidden.append(x)
        return self.end(x, y, hidden)

    def end(self, x: Tensor, y: Tensor, hidden: list[Tensor]) -> Any:
        return F.mse_loss(self.heads[0](x), y) + F.mse_loss(self.heads[1](x), y)


class TupleOfLosses(Stack):
    def end(self, x, y, hidden):
        return F.mse_loss(self.heads[0](x), y), F.l1_loss(self.heads[1](x), y)


class DictOfLosses(Stack):
    """Losses on stages of their own, and outputs that are none."""

    def end(self, x, y, hidden):
        losses = {f"loss {i}": F.mse_loss(self.heads[i % 2](h), y) for i, h in enumerate(hidden)}
        return {**losses, "logits": x, "hidden": hidden, "none": None}


class AuxiliaryLosses(Stack):
    """Each layer leaves its part of the loss in an attribute."""

    def each(self, index, x):
        self.layers[index].extra = x.square().mean() + self.layers[index].up.weight.norm()
        return self.layers[index](x)

    def end(self, x, y, hidden):
        return super().end(x, y, hidden) + 0.1 * sum(layer.extra for layer in self.layers)


class Shared(Stack):
    """One layer at two places, one called twice, a matrix used on both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]
        self.heads[1].weight = self.heads[0].weight

    def each(self, index, x):
        x = self.layers[3](x) if index == 1 else x @ self.heads[0].weight if index == 0 else x
        return self.layers[index](x)


class OwnTeacher(Stack):
    """The model itself, without gradients, makes the targets."""

    def end(self, x, y, hidden):
        with torch.no_grad():
            target = self.layers[1](self.layers[0](y))
        return F.mse_loss(self.heads[0](x), target) + self.heads[1](x.detach()).square().mean()


class Writes(Stack):
    """Activations written in place, through views, and gathered in a new tensor."""

    def each(self, index, x):
        y = self.layers[index](x)
        y[:, 0] = 0
        y[..., :4].mul_(2)
        out = torch.zeros_like(y)
        out[:, 1:] = y[:, :-1]
        return out.masked_fill_((torch.arange(6) % 2).bool()[:, None], 0.25) + x


class Numbers(Stack):
    """Parameters without dims, with one entry, and a vector that is taken apart for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.gates = nn.ParameterDict({str(i): nn.Parameter(torch.ones(1)) for i in range(4)})
        self.weights = nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        for layer, gate, weight in zip(self.layers, self.gates.values(), self.weights, strict=True):
            x = layer(x) * gate * weight * self.scale
        return self.end(x, y, [])


class NotContiguous(Stack):
    """Transposed matrices."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t() / 3)


class Checkpointed(Stack):
    """Layers under both kinds of checkpoint."""

    def each(self, index, x):
        return checkpoint(self.layers[index], x, use_reentrant=index in (1, 2))


class PartlyFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_("layers.1" not in name and not name.endswith("up.bias"))


class SparseTables(Stack):
    """Tables whose gradients are sparse tensors in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(7, WIDTH, sparse=True, mode="sum")

    def forward(self, x, y):
        rows = (x[..., 0] * 7).long() % 7
        return super().forward(x + self.table(rows) + self.bag(rows)[:, None], y)


def by_dims(module: nn.Module) -> torch.optim.Optimizer:
    """No decay of vectors; parameters with their names."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.3, "lr": 1e-2},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=3e-3, eps=1e-3)


class SlowNorms(AdamW):
    """Goes by the names in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if param.grad is not None and "norm" in name:
                    param.grad.mul_(0.1)
        return super().step(closure)


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.9**s, lambda s: 1 / (1 + s)])


USER_MODELS = {
    "tuple of losses": UserModel(build=TupleOfLosses, loss=lambda out, _: out[0] + 0.3 * out[1]),
    "dict of losses": UserModel(
        build=DictOfLosses,
        loss=lambda out, _: sum(value for key, value in out.items() if "loss" in key),
    ),
    "auxiliary losses": UserModel(build=AuxiliaryLosses),
    "shared": UserModel(build=Shared),
    "own teacher": UserModel(build=OwnTeacher),
    "writes": UserModel(build=Writes),
    "numbers": UserModel(build=Numbers),
    "sparse tables": UserModel(
        build=SparseTables, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    ),
    "not contiguous": UserModel(build=NotContiguous),
    "checkpointed": UserModel(build=Checkpointed),
    "partly frozen, groups and a schedule": UserModel(
        build=PartlyFrozen, optimizer=by_dims, schedule=scheduled
    ),
    "an optimizer that goes by names": UserModel(
        build=Stack, optimizer=lambda m: SlowNorms(m.named_parameters(), lr=1e-2, eps=1e-3)
    ),
}
