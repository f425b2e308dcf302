"""One lowered graph runs eagerly and under torch.compile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from planner.language.layout.placement import OpSharding, parse_placement
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_graph
from planner.language.ops.registry import local_ops
from planner.runtime.stage.program_fx import to_graph_module
from tests.sharding.models import captured
from tests.sharding.programs import one_op, place, random_values
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


ONES = torch.ones(64, 32)
IMAGES = torch.ones(32, 32, 2, 2)
Q, K, V = (torch.ones(4, 8, 16, 4) for _ in range(3))
RANDOM_OPS = {
    "dropout": ("aten.dropout.default", (ONES, 0.5, True)),
    "feature_dropout": ("aten.feature_dropout.default", (IMAGES, 0.5, True)),
    "alpha_dropout": ("aten.alpha_dropout.default", (ONES, 0.5, True)),
    "attention": (
        "aten.scaled_dot_product_attention.default",
        (Q, K, V, None, 0.5),
    ),
    "causal attention": (
        "aten.scaled_dot_product_attention.default",
        (Q, K, V, None, 0.5, True),
    ),
}


def draw_twice(target: str, args: tuple, text: str) -> dict[str, list[np.ndarray]]:
    """On a gloo rank, eager and compiled: what two equal ops in a row make, and a gradient."""
    single = one_op(target, *args)
    form = local_ops(
        single.op, OpSharding.parse(text), single.program.tensor, axis="tp", axis_size=2
    )
    again = tuple(
        replace(op, name=f"{op.name}_2", outputs=tuple(f"{name}_2" for name in op.outputs))
        for op in form.ops
    )
    program = replace(
        single.program,
        ops=(*form.ops, *again),
        outputs=(form.ops[-1].outputs[0], again[-1].outputs[0]),
    )
    module = to_graph_module(program, {"tp": dist.group.WORLD}, torch.device("cpu"))
    placements = OpSharding.parse(text).inputs
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    found = {}
    for name, run in {
        "eager": module,
        "compiled": torch.compile(module, backend="aot_eager", fullgraph=True),
    }.items():
        torch.manual_seed(5)
        values = [
            place(t, p, dist.get_rank(), 2).requires_grad_()
            for t, p in zip(tensors, placements, strict=True)
        ]
        first, second = run(*values)
        first.sum().backward()
        found[name] = [x.detach().numpy() for x in (first, second, values[-1].grad)]
    return found


def draw_each(ops: dict[str, tuple], texts: dict[str, list[str]]) -> dict:
    return {(n, t): draw_twice(*ops[n], t) for n in ops for t in texts[n]}


@pytest.fixture(scope="module")
def draws():
    """By (op, sharding): what each rank drew."""
    simple = ["R->R", "S(0)->S(0)"]
    texts = {
        "dropout": simple,
        "feature_dropout": simple,
        "alpha_dropout": simple,
        "attention": ["R,R,R->R", "S(1),S(1),S(1)->S(1)"],
        "causal attention": ["S(2),R,R->S(2)"],
    }
    return run_ranks(draw_each, 2, RANDOM_OPS, texts)


@pytest.mark.slow
def test_random_ops_compile(draws):
    """D9, M5: eager and compiled, without a graph break: replicas draw the same numbers, shards
    and two calls in a row different ones, and about half of all is dropped.
    """
    for case in draws[0]:
        for how in ("eager", "compiled"):
            (first, second, grad), (other, other_second, _) = (rank[case][how] for rank in draws)
            assert not np.array_equal(first, second), (case, how)
            if case[1].endswith("->R"):
                assert np.array_equal(first, other), (case, how)
                assert np.array_equal(second, other_second), (case, how)
            else:
                assert not np.array_equal(first, other), (case, how)
            assert np.isfinite(grad).all(), (case, how)
            if case[0] in ("dropout", "feature_dropout"):
                assert 0.45 < (first > 0).mean() < 0.55, (case, how)
                assert np.array_equal(first, grad), "the gradient of a dropped one is its mask"
                assert case[0] == "dropout" or (first == first[..., :1, :1]).all(), (case, how)
            elif "attention" in case[0]:
                assert first.mean() == pytest.approx(1, abs=0.1), (case, how)
            else:
                assert len(np.unique(first.round(4))) == 2, (case, how)
                assert first.mean() == pytest.approx(ALPHA_MEAN, abs=0.1), (case, how)


# Alpha dropout sets dropped ones to -1.758 and rescales: of ones and p = 0.5, with
# a = ((1.758**2 * 0.5 + 1) * 0.5) ** -0.5 = 0.887, the mean is a * (0.5 * (1 - 1.758) + 0.879).
ALPHA_MEAN = 0.4434
