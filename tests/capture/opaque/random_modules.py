"""Random models of odd constructs: parts whose course depends on values, joined in random ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.constructs import WIDTH, Reversed, RoundedThrough

Step = Callable[[nn.Module, Tensor], Tensor]
"""From rows [n, WIDTH] to as many."""


def _where(self: Any, x: Tensor) -> Tensor:
    picked = x[:, 0] > 0
    made = x.clone()
    made[picked] = self.layer(x[picked])
    return made


def _loop(self: Any, x: Tensor) -> Tensor:
    chosen = x[:, :3].argmax(-1)
    made = torch.zeros_like(x)
    for index in chosen.unique().tolist():
        rows = (chosen == index).nonzero().flatten()
        made = made.index_copy(0, rows, (1 + index) * self.layer(x[rows]))
    return made


def _while(self: Any, x: Tensor) -> Tensor:
    rows = []
    for row in x:
        while row.abs().sum().item() < 2:
            row = 2 * row + 0.1
        rows.append(row)
    return self.layer(torch.stack(rows))


def _lengths(self: Any, x: Tensor) -> Tensor:
    ends = (1 + x.abs().sum(-1).long().remainder(WIDTH)).tolist()
    return torch.stack([F.pad(row[:end], (0, WIDTH - end)) for row, end in zip(x, ends)])  # noqa: B905


def _scatter(self: Any, x: Tensor) -> Tensor:
    mask = x > 0
    return torch.zeros_like(x).masked_scatter(mask, x.masked_select(mask).sin())


def _choice(self: Any, x: Tensor) -> Tensor:
    return torch.stack([row * 2 if row.max() > 0.3 else self.layer(row) for row in x])


def _batch_choice(self: Any, x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else self.layer(x)


def _fewer(self: Any, x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def _dropped(self: Any, x: Tensor) -> Tensor:
    return F.dropout(_where(self, x), 0.5)


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count += int((x > 0).sum())
    return _where(self, x)


def _remembered(self: Any, x: Tensor) -> Tensor:
    self.latest = _where(self, x)
    return self.latest


def _written(self: Any, x: Tensor) -> Tensor:
    x[x > 0] = 0
    return x


DEPENDENT: tuple[Step, ...] = (
    _where, _loop, _while, _lengths, _scatter, _choice, _batch_choice, _fewer, _dropped, _counted,
    _remembered, _written,
)  # fmt: skip

PLAIN: tuple[Step, ...] = (
    lambda self, x: torch.tanh(self.layer(x)),
    lambda self, x: x * self.layer(x).sigmoid(),
    lambda self, x: RoundedThrough.apply(x, 4),
    lambda self, x: Reversed.apply(x, 0.5),
    lambda self, x: checkpoint(torch.sin, x, use_reentrant=False),
    lambda self, x: x + x.detach().mean(-1, keepdim=True),
)


class Part(nn.Module):
    """Some steps one after another, in one forward."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.layer, self.steps, self.count = nn.Linear(WIDTH, WIDTH), steps, 0

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(self, x)
        return x


class Around(nn.Module):
    """A part, and what uses its result: as many rows, however many the part gave."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        made = self.part(x)
        return x + F.pad(made, (0, 0, 0, len(x) - len(made)))


class Odd(nn.Module):
    """Parts in a row."""

    def __init__(self, parts: list[nn.Module], own: Step | None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts, self.own = nn.ModuleList(parts), own

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(torch.tanh(self.layer(x)))
        return F.mse_loss(x if self.own is None else self.own(self, x), target)


def random_module(seed: int) -> tuple[nn.Module, list[str]]:
    """Return a model and the names of what it is made of."""
    rng = random.Random(seed)
    names: list[str] = []

    def part() -> nn.Module:
        steps = [rng.choice(PLAIN) for _ in range(rng.randint(0, 2))]
        steps.insert(rng.randint(0, len(steps)), rng.choice(DEPENDENT))
        made: nn.Module = Part(tuple(steps))
        names.extend(step.__name__ for step in steps)
        if rng.random() < 0.3:
            made = Around(made)
            names.append("around")
        if rng.random() < 0.2:
            made.register_forward_hook(lambda module, args, out: 2 * out)
            names.append("hook")
        return made

    torch.manual_seed(seed)
    parts = [part() for _ in range(rng.randint(1, 3))]
    own = rng.choice(DEPENDENT) if rng.random() < 0.1 else None
    return Odd(parts, own), names
