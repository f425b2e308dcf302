"""Loops over experts as users and libraries write them, in a small model of a few such layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.language.graph import ModelGraph
from tests.capture.masks.attending import loss_of_graph
from tests.capture.routing import dealing
from tests.capture.routing.dealing import CHOSEN, EXPERTS, INNER, LAYERS, WIDTH

Loop = Callable[["Layer", Tensor, Tensor, Tensor], Tensor]
"""Of a layer, rows [r, h], weights [r, k] and numbers of experts [r, k]: the rows' results."""


class Gated(nn.Module):
    """The expert of transformers' decoders up to version 4."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(rows)) * self.w3(rows))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class Layer(nn.Module):
    """A router and experts; `loop` goes through these. With `shut` none chooses the last one."""

    def __init__(self, loop: Loop, make: Callable[[], nn.Module], *, chosen: int, shut: bool):
        super().__init__()
        self.loop, self.chosen = loop, chosen
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(make() for _ in range(EXPERTS))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.shared = nn.Linear(WIDTH, WIDTH)
        closed = [0.0] * (EXPERTS - 1) + [-1e9 if shut else 0.0]
        self.register_buffer("closed", torch.tensor(closed))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = (self.gate(rows) + self.closed.to(x.dtype)).softmax(-1)
        weights, ids = scores.topk(self.chosen, dim=-1)
        return self.loop(self, rows, weights, ids).view_as(x)


# -------------------------------------------------------------------------------------- loops


def by_where(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        out.index_add_(0, which, expert(rows[which]) * weights[which, slot].unsqueeze(-1))
    return out


def passing_over(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = (ids == number).nonzero(as_tuple=True)
        if which.numel() == 0:
            continue
        out.index_add_(0, which, expert(rows[which]) * weights[which, slot, None])
    return out


def of_mixtral(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """transformers 4.36 to 4.45."""
    out = torch.zeros((len(rows), WIDTH), dtype=rows.dtype, device=rows.device)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        slot, which = torch.where(mask[number])
        state = rows[None, which].reshape(-1, WIDTH)
        made = layer.experts[number](state) * weights[which, slot, None]
        out.index_add_(0, which, made.to(rows.dtype))
    return out


def of_qwen2_moe(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """transformers 4.46 and later: experts that were hit."""
    out = torch.zeros((len(rows), WIDTH), dtype=rows.dtype, device=rows.device)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in hit:
        expert = layer.experts[number]
        slot, which = torch.where(mask[number].squeeze(0))
        state = rows[None, which].reshape(-1, WIDTH)
        made = expert(state) * weights[which, slot, None]
        out.index_add_(0, which, made.to(rows.dtype))
    return out


def of_deepseek_v3(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """transformers 4.48 and later."""
    out = torch.zeros_like(rows, dtype=weights.dtype)
    masks = F.one_hot(ids, num_classes=len(layer.experts)).permute(2, 0, 1)
    for number in range(len(layer.experts)):
        expert, mask = layer.experts[number], masks[number]
        which, slot = torch.where(mask)
        if which.numel() > 0:
            made = expert(rows[which]) * weights[which, slot].unsqueeze(-1)
            out.index_add_(0, which, made)
    return out.type(rows.dtype)


def of_deepseek_v2(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek's own code in training: copies of rows, picked by a mask."""
    flat = ids.view(-1)
    copies = rows.repeat_interleave(layer.chosen, dim=0)
    made = torch.empty_like(copies)
    for number, expert in enumerate(layer.experts):
        made[flat == number] = expert(copies[flat == number])
    return (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def of_tables(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """As many tutorials: rows of which any choice is the expert, and a table of gates."""
    gates = torch.zeros(len(rows), EXPERTS, dtype=rows.dtype).scatter(1, ids, weights)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        mask = (ids == number).any(dim=-1)
        if mask.any():
            made = expert(rows[mask]) * gates[mask, number].unsqueeze(1)
            out[mask] += made
    return out


def of_stacks(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """transformers 5, eager: experts are slices of a parameter."""
    out = torch.zeros_like(rows)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in hit:
        number = number[0]
        if number == EXPERTS:
            continue
        slot, which = torch.where(mask[number])
        made = F.silu(rows[which] @ layer.up[number])
        made = F.linear(made, layer.down[number]) * weights[which, slot, None]
        out.index_add_(0, which, made.to(out.dtype))
    return out


def beside_shared(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Rows are added to those of an expert that all rows take."""
    out = layer.shared(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        out = out.index_add(0, which, weights[which, slot].unsqueeze(-1) * expert(rows[which]))
    return out


def backwards(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The last expert first, and places as a column."""
    flat = ids.flatten()
    copies = rows[torch.arange(len(flat), device=rows.device) // layer.chosen]
    out = torch.zeros_like(copies)
    for number in reversed(range(EXPERTS)):
        which = torch.nonzero(flat == number).squeeze(-1)
        made = layer.experts[number](copies[which]) * weights.view(-1, 1)[which]
        out = out.index_add(0, which, made)
    return out.view(-1, layer.chosen, WIDTH).sum(1)


def of_one(layer: Layer, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Each row has one expert: a mask of rows puts its result in their place."""
    scores = layer.gate(rows).softmax(-1)
    best, number = scores.max(dim=-1)
    out = torch.zeros_like(rows)
    for index, expert in enumerate(layer.experts):
        mask = number == index
        out[mask] = expert(rows[mask]) * best[mask].unsqueeze(-1)
    return out


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        by_where, passing_over, of_mixtral, of_qwen2_moe, of_deepseek_v3, of_deepseek_v2,
        of_tables, of_stacks, beside_shared, backwards, of_one,
    )
}  # fmt: skip
PASSING_OVER = {"passing_over", "of_qwen2_moe", "of_deepseek_v3", "of_tables"}
"""Loops that leave modules of experts without rows alone."""


class Looping(nn.Module):
    """Layers of experts in a loop, and a head."""

    def __init__(
        self, loop: Loop, make: Callable[[], nn.Module] = Gated, *, chosen: int = CHOSEN,
        layers: int = LAYERS, shut: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(loop, make, chosen=chosen, shut=shut) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def with_ties(module: Looping, what: str) -> Looping:
    """Put an expert ("expert"), or a layer ("layer"), of a module in a second place."""
    if what == "layer":
        module.layers[-1] = module.layers[0]
    for layer in module.layers if what == "expert" else ():
        layer.experts[1] = layer.experts[0]
    return module


def batch_of(size: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return dealing.batch_of(size, dtype)


def captured(module: nn.Module, make_batch: Callable[[int], Any] = batch_of) -> ModelGraph:
    return dealing.captured(module, make_batch)


def apart(graph: ModelGraph, module: nn.Module, batch: Any) -> float:
    """Return how far a graph's loss and gradients are from the module's own, of the largest."""
    params = [p for p in module.parameters() if p.requires_grad]
    ours, theirs = loss_of_graph(graph, module, batch), module(**batch)
    found = [
        torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        for loss in (ours, theirs)
    ]
    largest = max(float(grad.abs().max()) for grad in found[1])
    gaps = [float((a - b).abs().max()) / largest for a, b in zip(*found, strict=True)]
    return max(float(((ours - theirs).abs() / theirs.abs()).detach()), *gaps)
