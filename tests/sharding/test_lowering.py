"""Lowered programs equal the dense ones on every rank, values and gradients."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from planner.errors import LayoutError
from planner.language.layout.placement import OpSharding
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_graph
from planner.language.ops.registry import local_ops
from planner.language.plan import ClassLayout
from planner.runtime.stage.program_fx import to_graph_module
from tests.sharding.models import NAMES, captured
from tests.sharding.programs import check_lowered, one_op
from tests.sharding.random_layouts import random_layout
from tests.sharding.ranks import on_ranks


@pytest.mark.parametrize(
    ("name", "axis_size"), [*((name, 2) for name in NAMES), ("gpt", 4), ("hf-mixtral", 4)]
)
def test_propagated_layouts_equal_dense(name, axis_size):
    """P2, D5, M22: every block class of every model, column and row splits included."""
    graph = captured(name)
    for layout in propagate_graph(graph, microbatch_size=2, axis_size=axis_size):
        check_lowered(graph.classes[layout.class_index].bind(2), layout, axis_size)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("name", NAMES)
def test_random_layouts_equal_dense(name, seed):
    """M10, M12: any strategy for any op, joined by any redistribution, computes the same."""
    graph = captured(name)
    for index, program in enumerate(graph.classes):
        rng = random.Random(f"{name}{seed}{index}")
        bound = program.bind(2)
        check_lowered(bound, random_layout(bound, rng, 2), 2, seed)


def test_replicated_dropout_is_equal_and_sharded_dropout_independent():
    """M5: masks agree on replicas, differ on shards, and the next call draws anew."""
    program = one_op("aten.dropout.default", torch.ones(64, 8, dtype=torch.float64), 0.5, True)
    masks = {}
    for text in ("R->R", "S(0)->S(0)"):
        sharding = OpSharding.parse(text)
        form = local_ops(program.op, sharding, program.program.tensor, axis="tp", axis_size=2)
        local = replace(program.program, ops=form.ops)

        def body(rank, local=local):
            # Threads share one generator: each seeds it and draws while the others wait.
            with _ONE_AT_A_TIME:
                torch.manual_seed(3)
                module = to_graph_module(local, {"tp": dist.group.WORLD}, torch.device("cpu"))
                x = torch.ones(32, 8, dtype=torch.float64)
                return module(x)[0], module(x)[0]

        masks[text] = on_ranks(2, body)
    (first, second), (other, other_second) = masks["R->R"]
    assert torch.equal(first, other)
    assert torch.equal(second, other_second)
    (first, second), (other, _) = masks["S(0)->S(0)"]
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)
    for mask in (first, second, other):
        assert 0.35 < (mask > 0).double().mean() < 0.65


_ONE_AT_A_TIME = threading.Lock()


def test_an_op_may_take_one_tensor_in_two_placements():
    """A square whose factors are placed P and R gets its own redistribution for each."""
    single = one_op("aten.mul.Tensor", *[torch.randn(4, 4, dtype=torch.float64)] * 2)
    layout = ClassLayout(
        class_index=0, inputs=("P",), params=(), outputs=("R",), ops=(("op", "P,R->P"),)
    )
    check_lowered(single.program, layout, 2)


def test_consumers_share_one_redistribution():
    """q, k and v projections cost one all-reduce in the backward pass, not three."""
    graph = captured("gpt")
    layout = next(
        x for x in propagate_graph(graph, microbatch_size=2, axis_size=2) if len(x.params) > 8
    )
    local = lower(graph.classes[layout.class_index].bind(2), layout, axis_size=2)
    sources = [(op.args[0], op.args[3:]) for op in local.ops if op.target == REDISTRIBUTE]
    assert len(sources) == len(set(sources))


def test_one_rank_and_no_layout_leave_the_program_alone():
    """P26: an axis of size one takes the same path and changes nothing."""
    program = captured("gpt").classes[0].bind(2)
    layout = propagate_graph(captured("gpt"), microbatch_size=2, axis_size=2)[0]
    assert lower(program, None, axis_size=2) is program
    assert lower(program, layout, axis_size=1) is program


def test_a_layout_of_another_program_is_refused():
    """P5: the message says what does not fit."""
    graph = captured("gpt")
    layouts = propagate_graph(graph, microbatch_size=2, axis_size=2)
    with pytest.raises(LayoutError, match=r"the layout has placements of \d+ \w+ but .* has \d+"):
        lower(graph.classes[0].bind(2), layouts[1], axis_size=2)
    with pytest.raises(LayoutError, match=r"does not divide|must be a multiple"):
        lower(graph.classes[1].bind(2), layouts[1], axis_size=3)
