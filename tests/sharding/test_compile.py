"""One lowered graph runs eagerly and under torch.compile."""

from __future__ import annotations

import torch
import torch.distributed as dist

from planner.lowering import lower
from planner.placement import parse_placement
from planner.program_fx import to_graph_module
from planner.sharding import propagate_graph
from tests.sharding.models import captured
from tests.sharding.programs import place, random_values
from tests.spawn import run_ranks


def run_both_ways() -> tuple[list, list]:
    """On a gloo rank: outputs and gradients of a layer, eager and compiled as one graph."""
    graph = captured("gpt")
    layout = next(
        x for x in propagate_graph(graph, microbatch_size=2, axis_size=2) if len(x.params) > 8
    )
    program = graph.classes[layout.class_index].bind(2)
    module = to_graph_module(
        lower(program, layout, axis_size=2), {"tp": dist.group.WORLD}, torch.device("cpu")
    )
    whole = random_values(program, 0)
    names = (*program.inputs, *program.params)
    texts = (*layout.inputs, *layout.params)
    found = []
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        values = [
            place(whole[name], parse_placement(text), dist.get_rank(), 2).requires_grad_()
            for name, text in zip(names, texts, strict=True)
        ]
        (output,) = run(*values)
        output.square().sum().backward()
        found.append([output.detach().numpy(), *(v.grad.numpy() for v in values)])
    return found[0], found[1]


def test_compiled_equals_eager():
    """D9, D20: no graph break in a layer with collectives; equal outputs and gradients."""
    for eager, compiled in run_ranks(run_both_ways, 2):
        assert len(eager) == len(compiled) > 8
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(b), torch.from_numpy(a), rtol=1e-12, atol=1e-12
            )
