"""Random bodies for `constructs.Model`: a dozen ops on whatever dims, then a loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.across.constructs import WIDTH, Body, Model

Step = Callable[[list[Tensor], Model, dict[str, Tensor]], Tensor]

MAX_NUMEL = 200_000


def random_body(seed: int, example: dict[str, Tensor]) -> tuple[Body, list[str]]:
    """Return a body and the names of its steps; `example` says which shapes go together."""
    rng = random.Random(seed)
    model = Model(lambda m, b: b["x"].mean()).to(example["x"].dtype)
    steps: list[Step] = []
    names: list[str] = []

    def grow(pool: list[Tensor]) -> None:
        for _ in range(40):
            name, step = rng.choice(_STEPS)(rng, pool)
            try:
                made = step(pool, model, example)
            except (RuntimeError, IndexError):
                continue
            if made.numel() > MAX_NUMEL or made.numel() == 0 or not made.is_floating_point():
                continue
            pool.append(made.detach())
            steps.append(step)
            names.append(name)
            return

    pool = [model.fc(example["x"]).detach()]
    for _ in range(rng.randint(2, 9)):
        grow(pool)
    end, ending = rng.choice(list(_ENDS.items()))
    names.append(end)

    def body(m: Model, b: dict[str, Tensor]) -> Tensor:
        made = [m.fc(b["x"])]
        for step in steps:
            made.append(step(made, m, b))
        return ending(made[-1], b)

    return body, names


def _pick(rng: random.Random, pool: list[Tensor]) -> int:
    """A tensor, the last ones rather than the first."""
    return len(pool) - 1 if rng.random() < 0.7 else rng.randrange(len(pool))


def _unary(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    name, f = rng.choice(list(_UNARY.items()))
    return name, lambda p, m, b: f(p[i])


def _linear(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    return "linear", lambda p, m, b: m.fc2(p[i])


def _reduce(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i, keep = _pick(rng, pool), rng.random() < 0.5
    name, f = rng.choice(list(_REDUCTIONS.items()))
    rank = pool[i].ndim
    dims = tuple(sorted(rng.sample(range(rank), rng.randint(1, rank)))) if rank else ()
    return f"{name}{dims}", lambda p, m, b: f(p[i], dims, keep)


def _along(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    name, f = rng.choice(list(_ALONG.items()))
    dim = rng.randrange(max(pool[i].ndim, 1))
    return f"{name}({dim})", lambda p, m, b: f(p[i], dim)


def _transpose(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    a, c = (rng.randrange(max(pool[i].ndim, 1)) for _ in range(2))
    return f"transpose({a},{c})", lambda p, m, b: p[i].transpose(a, c)


def _flatten(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    start = rng.randrange(max(pool[i].ndim - 1, 1))
    return f"flatten({start})", lambda p, m, b: p[i].flatten(start, start + 1)


def _unflatten(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    dim, parts = rng.randrange(max(pool[i].ndim, 1)), rng.choice([2, 4])
    front = rng.random() < 0.5
    sizes = (parts, -1) if front else (-1, parts)
    return f"unflatten({dim},{sizes})", lambda p, m, b: p[i].unflatten(dim, sizes)


def _binary(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i, j = _pick(rng, pool), rng.randrange(len(pool))
    name, f = rng.choice(list(_BINARY.items()))
    return f"{name}[{i},{j}]", lambda p, m, b: f(p[i], p[j])


def _sized(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    if rng.random() < 0.5:
        return "/batch", lambda p, m, b: p[i] / b["x"].shape[0]
    return "*batch", lambda p, m, b: p[i] * b["x"].shape[0]


def _by_number(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i, j = _pick(rng, pool), rng.randrange(len(pool))
    kind = rng.choice(["arange", "order", "halves"])

    def step(p: list[Tensor], m: Model, b: dict[str, Tensor]) -> Tensor:
        t = p[i]
        if kind == "arange":
            return t[torch.arange(t.shape[0], device=t.device)]
        if kind == "order":
            return t[p[j].flatten(1).sum(1).detach().argsort()]
        return t[torch.arange(t.shape[0], device=t.device) // 2]

    return f"by_{kind}[{i},{j}]", step


def _join(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i, j = _pick(rng, pool), rng.randrange(len(pool))
    dim = rng.randrange(max(pool[i].ndim, 1))
    if rng.random() < 0.5:
        return f"cat({dim})[{i},{j}]", lambda p, m, b: torch.cat([p[i], p[j]], dim)
    return f"half({dim})", lambda p, m, b: p[i].chunk(2, dim)[1]


def _masked(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)

    def step(p: list[Tensor], m: Model, b: dict[str, Tensor]) -> Tensor:
        mask = b["mask"]
        while mask.ndim < p[i].ndim:
            mask = mask.unsqueeze(-1)
        return p[i] * mask

    return "masked", step


def _weights(rng: random.Random, pool: list[Tensor]) -> tuple[str, Step]:
    i = _pick(rng, pool)
    return "+weight", lambda p, m, b: p[i] + m.fc2.weight[0, : p[i].shape[-1]].mean()


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "neg": torch.neg,
    "double": lambda t: 2 * t,
    "plus": lambda t: t + 0.3,
    "square": lambda t: t.pow(2),
    "cube": lambda t: t**3,
    "clamp": lambda t: t.clamp(min=0.1),
    "double_of": lambda t: t.to(torch.float32).to(t.dtype),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "unsqueeze_last": lambda t: t.unsqueeze(-1),
    "squeeze": lambda t: t.squeeze(),
    "tril": lambda t: t.tril(),
    "repeat": lambda t: t.repeat(2, *[1] * (t.ndim - 1)),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 0),
    "triu": lambda t: t.triu(),
}

_REDUCTIONS: dict[str, Callable[[Tensor, Any, bool], Tensor]] = {
    "sum": lambda t, d, k: t.sum(d, keepdim=k),
    "mean": lambda t, d, k: t.mean(d, keepdim=k),
    "amax": lambda t, d, k: t.amax(d, keepdim=k),
    "var": lambda t, d, k: t.var(d, keepdim=k, unbiased=False),
    "logsumexp": lambda t, d, k: t.logsumexp(d, keepdim=k),
    "norm": lambda t, d, k: (t + 1e-3).norm(dim=d, keepdim=k),
}

_ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda t, d: t.softmax(d),
    "log_softmax": lambda t, d: t.log_softmax(d),
    "cumsum": lambda t, d: t.cumsum(d),
    "flip": lambda t, d: t.flip(d),
    "roll": lambda t, d: t.roll(1, d),
    "sort": lambda t, d: t.sort(d).values,
    "top": lambda t, d: t.topk(1, d).values,
    "select": lambda t, d: t.select(d, 0),
    "rest": lambda t, d: t.narrow(d, 0, t.shape[d] - 1),
    "every_other": lambda t, d: t[(slice(None),) * d + (slice(None, None, 2),)],
    "centred": lambda t, d: t - t.mean(d, keepdim=True),
    "index_zero": lambda t, d: t.index_select(d, torch.zeros(1, dtype=torch.long)),
}

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "over": lambda a, b: a / b,
    "where": lambda a, b: torch.where(b > 0, a, 0.5 * a),
    "maximum": torch.maximum,
    "matmul": lambda a, b: a @ b.transpose(-1, -2),
    "gram": lambda a, b: a.transpose(-1, -2) @ b,
    "product": lambda a, b: torch.einsum("b...i,b...i->b...", a, b),
    "compare": lambda a, b: torch.einsum("bi,ci->bc", a, b),
}

_ENDS: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "mean": lambda t, b: t.mean(),
    "square mean": lambda t, b: t.pow(2).mean(),
    "sum": lambda t, b: t.sum(),
    "sum per sample": lambda t, b: t.sum() / b["x"].shape[0],
    "root": lambda t, b: (t.pow(2).mean() + 1).sqrt(),
    "over mask": lambda t, b: t.pow(2).sum() / b["mask"].sum(),
}

_STEPS = [
    *[_unary] * 4, *[_reduce] * 3, *[_along] * 3, *[_binary] * 4, _linear, _linear, _transpose,
    _flatten, _unflatten, _sized, _by_number, _join, _masked, _weights,
]  # fmt: skip
assert WIDTH % 4 == 0
