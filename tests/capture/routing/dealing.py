"""Programs with experts as users write them: in which order rows are dealt, and how they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.language.graph import ModelGraph
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS, SORT_ROWS, UNSORT_ROWS
from tests.capture.masks.attending import loss_of_graph

EXPERTS, CHOSEN, WIDTH, INNER, PLACES, LAYERS = 4, 2, 8, 16, 6, 2

Way = Callable[..., Tensor]
"""A step of a program: what a `Dealt` calls with what it needs of itself."""


# ------------------------------------------------------------------------------- orders


def by_sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted numbers of experts, and where they were."""
    return torch.sort(ids.reshape(-1))


def by_stable_argsort(ids: Tensor) -> tuple[Tensor, Tensor]:
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    return flat[order], order


def by_numpy_sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    found = ids.view(-1).to(torch.int32).sort(dim=0, stable=True)
    return found.values, found.indices


ORDERS: dict[str, Way] = {
    "sort": by_sort,
    "argsort": by_stable_argsort,
    "stable": by_numpy_sort,
}


# ------------------------------------------------------------------------------- counts


def by_histogram(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    return torch.histc(sorted_ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


def by_one_hot(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    return F.one_hot(ids, EXPERTS).sum(dim=(0, 1))


def by_hits(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    return (ids.flatten().unsqueeze(-1) == torch.arange(EXPERTS)).sum(0)


def by_ones(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    flat = ids.flatten()
    return torch.zeros(EXPERTS, dtype=torch.long).scatter_add_(0, flat, torch.ones_like(flat))


COUNTS: dict[str, Way] = {
    "histc": by_histogram,
    "one_hot": by_one_hot,
    "hits": by_hits,
    "ones": by_ones,
}


# --------------------------------------------------------------------------------- rows


def by_row(x: Tensor, order: Tensor) -> Tensor:
    return x[order // CHOSEN]


def by_copy(x: Tensor, order: Tensor) -> Tensor:
    return x.repeat_interleave(CHOSEN, 0)[order]


def by_expanded_copy(x: Tensor, order: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(-1, CHOSEN, -1).reshape(-1, WIDTH).index_select(0, order)


def by_entry(x: Tensor, order: Tensor) -> Tensor:
    rows = torch.div(order, CHOSEN, rounding_mode="floor")
    return torch.gather(x, 0, rows.view(-1, 1).expand(-1, WIDTH))


TAKEN: dict[str, Way] = {
    "row": by_row,
    "copy": by_copy,
    "expanded": by_expanded_copy,
    "gather": by_entry,
}


# ----------------------------------------------------------------------------- way back


def by_inverse(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """As transformers 5 does: weighted in the new order, then put back by the order's inverse."""
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return made[back].view(-1, CHOSEN, WIDTH).sum(dim=1)


def by_order_of_order(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    back = made[torch.argsort(order)]
    return (back.view(-1, CHOSEN, WIDTH) * weights.unsqueeze(-1)).sum(1)


def by_place(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """As DeepSeek's own code: put to where rows were, cast, then weighted."""
    back = torch.empty_like(made)
    back[order] = made
    back = back.view(*weights.shape, -1).to(weights.dtype)
    return back.mul(weights.unsqueeze(-1)).sum(dim=1).to(made.dtype)


def by_addition(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    made = made * weights.view(-1, 1)[order]
    total = torch.zeros(len(weights), WIDTH, dtype=made.dtype)
    return total.index_add_(0, order // CHOSEN, made)


def by_scattered_addition(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    made = made * weights.flatten()[order][:, None]
    rows = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
    return made.new_zeros(len(weights), WIDTH).scatter_add(0, rows, made)


BACK: dict[str, Way] = {
    "inverse": by_inverse,
    "argsort": by_order_of_order,
    "place": by_place,
    "index_add": by_addition,
    "scatter_add": by_scattered_addition,
}


# -------------------------------------------------------------------------------- model


class Dealt(nn.Module):
    """Layers of experts; `ways` are what each step of a layer is done by."""

    def __init__(self, *, biased: bool = False, **ways: Way) -> None:
        super().__init__()
        usual = {"order": by_sort, "counts": by_histogram, "taken": by_row, "back": by_inverse}
        self.ways = {**usual, "ends": ends_of, "inside": inside_of, **ways}
        self.layers = nn.ModuleList(_Layer(self.ways, biased=biased) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class _Layer(nn.Module):
    def __init__(self, ways: dict[str, Way], *, biased: bool) -> None:
        super().__init__()
        self.ways = ways
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.last = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = self.gate(rows).softmax(-1)
        weights, ids = scores.topk(CHOSEN, dim=-1)
        sorted_ids, order = self.ways["order"](ids)
        ends = self.ways["ends"](self.ways["counts"](ids, sorted_ids))
        made = self.ways["taken"](rows, order)
        made = self.ways["inside"](self, made, sorted_ids, ends, order)
        return self.ways["back"](made, order, weights).view_as(x)


def ends_of(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def inside_of(layer: Any, rows: Tensor, sorted_ids: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    """Products of runs, with an activation between."""
    made = product(rows, layer.first, ends)
    if layer.bias is not None:
        made = made + layer.bias[sorted_ids]
    return product(F.silu(made), layer.last, ends)


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The user's own call where it takes the dtype; else the library's loop."""
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, matrices, offs=ends)
    import transformers.integrations.moe  # noqa: F401  (registers the op)

    return torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)


def batch_of(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {
        "x": torch.randn(size, PLACES, WIDTH, generator=generator).to(dtype),
        "labels": torch.randint(EXPERTS, (size, PLACES), generator=generator),
    }


def captured(module: nn.Module, make_batch: Callable[[int], Any] = batch_of) -> ModelGraph:
    return capture_module(module, make_batch(2), make_batch(3))


@contextmanager
def untold() -> Iterator[None]:
    """Inside, routing is captured op by op."""
    with mock.patch("planner.capture.module.with_told_routing", lambda raw: raw):
        yield


def told_ops(graph: ModelGraph) -> dict[str, int]:
    """Count the calls that told routing is made of, over the classes of blocks."""
    targets = [op.target for program in graph.classes for op in program.ops]
    names = {"sort": SORT_ROWS, "bias": BIAS_OF_RUNS, "unsort": UNSORT_ROWS}
    return {name: targets.count(target) for name, target in names.items()}


def sorts_left(graph: ModelGraph) -> int:
    """Count the sorts that are not told."""
    targets = [op.target for program in graph.classes for op in program.ops]
    return sum(target.startswith(("aten.sort", "aten.argsort")) for target in targets)


def losses_and_gradients(graph: ModelGraph, module: nn.Module, batch: Any) -> list[Tensor | None]:
    torch.manual_seed(0)  # some routers draw in training
    loss = loss_of_graph(graph, module, batch)
    params = [param for param in module.parameters() if param.requires_grad]
    return [loss, *torch.autograd.grad(loss, params, allow_unused=True)]


def check_bits(
    module: nn.Module,
    told: ModelGraph,
    make_batch: Callable[[int], Any] = batch_of,
) -> None:
    """Assert that the loss and every gradient are those of the graph that is not told."""
    with untold():
        plain = captured(module, make_batch)
    batch = make_batch(5)
    found, expected = (losses_and_gradients(graph, module, batch) for graph in (told, plain))
    names = ["loss", *(name for name, p in module.named_parameters() if p.requires_grad)]
    for name, mine, theirs in zip(names, found, expected, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs), name
