"""A model that attends under a mask of the test's choice, and graphs run as ranks run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.language.graph import ModelGraph, Op, Program
from planner.language.ops.record import packet_of
from planner.runtime.stage.program_fx import to_graph_module

LENGTH, WIDTH = 12, 8

MakeMask = Callable[[Mapping[str, Tensor]], Tensor]


class Attending(nn.Module):
    """One layer of attention under the mask that `make` returns of a batch."""

    def __init__(self, make: MakeMask) -> None:
        super().__init__()
        self.make = make
        self.embed, self.mix = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor, **tables: Tensor) -> Tensor:
        """Return the mean square of what attention makes of `ids`, [batch, places]."""
        query, key, value = (
            part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            for part in self.mix(self.embed(ids)).chunk(3, -1)
        )
        mask = self.make({"ids": ids, **tables})
        return F.scaled_dot_product_attention(query, key, value, mask).square().mean()


def batch_of(size: int, *tables: str) -> dict[str, Tensor]:
    """Return ids, and tables by name: numbers of documents, places in them, places that count."""
    generator = torch.Generator().manual_seed(size)
    documents = torch.randint(0, 3, (size, LENGTH), generator=generator).sort(-1)[0]
    started = torch.arange(LENGTH) - torch.searchsorted(documents, documents)
    counts = torch.arange(LENGTH) < torch.randint(3, LENGTH, (size, 1), generator=generator)
    all_tables = {"documents": documents, "positions": started, "counts": counts.long()}
    ids = torch.randint(0, 16, (size, LENGTH), generator=generator)
    return {"ids": ids} | {name: all_tables[name] for name in tables}


def captured(make: MakeMask, *tables: str) -> tuple[Attending, ModelGraph]:
    """Return the model of a mask in fp64, and its graph."""
    torch.manual_seed(0)
    module = Attending(make).double()
    return module, capture_module(module, batch_of(2, *tables), batch_of(3, *tables))


def attention_of(graph: ModelGraph) -> list[Op]:
    """Return the ops of attention, by class of blocks."""
    return [op for made in graph.classes for op in made.ops if "attention" in packet_of(op.target)]


def pairs_held(graph: ModelGraph, length: int) -> list[str]:
    """Return the tensors with two dims of sequences: an entry for each pair of positions."""
    programs = (graph.preamble, *graph.classes)
    return [t.name for p in programs for t in p.tensors if t.shape[-2:] == (length, length)]


def check_equal(
    module: nn.Module, graph: ModelGraph, batch: Mapping[str, Tensor], *, rounding: float = 1e-12
) -> None:
    """Assert that a graph has the loss and the gradients of its module, in fp64."""
    made: Any = module(**batch)
    loss = made if isinstance(made, Tensor) else made.loss
    params = dict(module.named_parameters())
    wanted = torch.autograd.grad(loss, list(params.values()))
    found = loss_of_graph(graph, module, batch)
    torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(found, list(params.values()))
    for name, mine, theirs in zip(params, grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=rounding, msg=name)


def loss_of_graph(graph: ModelGraph, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Run a graph's programs as a rank does, and return the loss."""
    every = {"remove_duplicate": False}
    held = dict(module.named_parameters(**every)) | dict(module.named_buffers(**every))
    size = len(next(iter(batch.values())))
    values: dict[str, Tensor] = {}
    for meta in graph.tensors:
        if meta.kind == "input":
            values[meta.name] = batch[meta.fqn]
        elif meta.kind in ("param", "buffer"):
            values[meta.name] = held[meta.fqn]
        elif meta.kind == "constant":
            dtype = getattr(torch, meta.dtype)
            values[meta.name] = torch.tensor(meta.data, dtype=dtype).reshape(meta.shape_at(size))
    if graph.whole is not None:
        made = graph.whole.program
        given = (values[name] for name in (*made.inputs, *made.params))
        found = dict(zip(made.outputs, _run(made.bind(size), *given), strict=True))
        values |= {name: found[value] for name, value in graph.whole.values}
        values |= {name: torch.ones(()) for name, _ in graph.whole.shares}
    preamble = graph.preamble
    names = (preamble.inputs, preamble.params, preamble.outputs)
    chain = [(preamble, *names)]
    chain += [(graph.classes[b.class_index], b.inputs, b.params, b.outputs) for b in graph.blocks]
    for program, inputs, params, outputs in chain:
        made = _run(program.bind(size), *(values[name] for name in (*inputs, *params)))
        values |= dict(zip(outputs, made, strict=True))
    return values[graph.loss]


def _run(program: Program, *values: Tensor) -> tuple[Tensor, ...]:
    module = to_graph_module(program, {"tp": None, "cp": None}, torch.device("cpu"))
    made: tuple[Tensor, ...] = module(*values)
    return made
