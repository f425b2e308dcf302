"""Programs lowered on two mesh axes: hybrid operator strategies and context parallelism."""

from __future__ import annotations

import re
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from planner.language.layout.axes import find_axis
from planner.language.layout.placement import Partial, Replicate, Shard, parse_placement
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.layout.redistribute import REDISTRIBUTE, op_collectives
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import local_program, lower
from planner.language.lowering.propagate import propagate_graph, propagate_layout, propagate_on
from planner.language.ops.families.products.grouped_heads import OWN_KEYS
from planner.language.plan import ClassLayout
from planner.runtime.stage.program_fx import to_graph_module
from tests.sharding.models import captured
from tests.sharding.programs import (
    backward,
    check_lowered,
    close,
    one_op,
    place,
    random_cotangents,
    random_values,
    run_dense,
    whole,
)
from tests.sharding.ranks import on_ranks

SDPA = "aten.scaled_dot_product_attention.default"

MESH = ProcessMesh(axes=("cp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))


def check_on_mesh(program, tp: ClassLayout, cp: ClassLayout, local=None) -> None:
    """Lower on tp, then on cp, run on 2 x 2 ranks and compare with the dense program.

    A `local` program given is one as ranks run it: gradients of parameters are summed over cp.
    """
    later = set(program.params) if local else set()
    local = local or lower(lower(program, tp, axis_size=2), cp, axis="cp", axis_size=2)
    names = (*program.inputs, *program.params)
    rest = [
        tuple(map(parse_placement, pair))
        for pair in zip((*cp.inputs, *cp.params), (*tp.inputs, *tp.params), strict=True)
    ]
    ends = [tuple(map(parse_placement, pair)) for pair in zip(cp.outputs, tp.outputs, strict=True)]
    tensors = random_values(program, 0)
    cotangents = random_cotangents(program, 1)
    outputs, grads = run_dense(program, tensors, cotangents)

    def part(tensor, pair, rank):
        for placement, at in zip(reversed(pair), reversed(MESH.coordinate(rank)), strict=True):
            tensor = place(tensor, placement, at, 2)
        return tensor

    def body(rank):
        groups = axis_groups(rank)
        values = {
            name: part(tensors[name], pair, rank).requires_grad_(program.tensor[name].requires_grad)
            for name, pair in zip(names, rest, strict=True)
        }
        found = to_graph_module(local, groups, torch.device("cpu"))(*values.values())
        kept = [tuple(_of_gradient(p) for p in pair) for pair in ends]
        backward(
            found,
            [
                None if g is None else part(g, k, rank)
                for g, k in zip(cotangents, kept, strict=True)
            ],
        )
        return [y.detach() for y in found], {name: v.grad for name, v in values.items()}

    results = on_ranks(4, body)

    def join(parts, pair):
        # tp cut first, so what cp cut inside is put together first.
        halves = [whole(parts[tp_rank::2], pair[0]) for tp_rank in range(2)]
        for first in halves[0]:
            for second in halves[1]:
                yield from whole([first, second], pair[1])

    for i, (dense, pair) in enumerate(zip(outputs, ends, strict=True)):
        for joined in join([values[i] for values, _ in results], pair):
            close(joined, dense.detach(), f"output {i} of {program.name}")
    for name, pair in zip(names, rest, strict=True):
        if grads[name] is not None:
            on_cp, on_tp = (_of_gradient(p) for p in pair)
            kept = (Partial() if name in later else on_cp, on_tp)
            for joined in join([found[name] for _, found in results], kept):
                close(joined, grads[name], f"gradient of {name} of {program.name}")


def axis_groups(rank):
    """Process groups of a rank by mesh axis; every rank makes all of them, as torch asks."""
    groups = {}
    for axis in MESH.axes:
        for ranks in MESH.groups(axis):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                groups[axis] = group
    return groups


def _of_gradient(placement):
    return Replicate() if isinstance(placement, Partial) else placement


def simple(sharding: str, inputs: str, outputs: str) -> ClassLayout:
    return ClassLayout(
        class_index=0,
        inputs=tuple(inputs.split(",")),
        params=(),
        outputs=(outputs,),
        ops=(("op", sharding),) if sharding else (),
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # ((n, 1, 1), (1, 1, n)) as the operator's two inputs are cut on one axis …
        ("S(0),S(0)->S(0)", ""),
        ("R,S(2)->S(2)", ""),
        ("S(2),S(1)->P", ""),
        # … and on both: batch by columns, columns by rows, rows by contraction.
        ("S(0),S(0)->S(0)", "R,S(2)->S(2)"),
        ("R,S(2)->S(2)", "S(1),R->S(1)"),
        ("S(1),R->S(1)", "S(2),S(1)->P"),
        ("S(0),S(0)->S(0)", "S(0),S(0)->S(0)"),
    ],
)
def test_batched_matmul_under_hybrid_strategies(first, second):
    """M7, D11: any strategy on one axis with any on the other, on four ranks."""
    single = one_op(
        "aten.bmm.default",
        torch.randn(4, 8, 6, dtype=torch.float64),
        torch.randn(4, 6, 4, dtype=torch.float64),
    )
    layouts = []
    for text in (first, second):
        inputs, _, output = (text or "R,R->R").partition("->")
        layouts.append(simple(text, inputs, output))
    check_on_mesh(single.program, *layouts)


@pytest.mark.parametrize("name", ["gpt", "hf-llama", "hf-gpt2", "encoder-decoder"])
def test_context_parallelism_equals_dense(name):
    """D19: each rank has a part of every sequence; keys and values are gathered."""
    graph = captured(name)
    layouts = propagate_graph(
        graph, microbatch_size=2, axis_size=2, boundary=Shard(1), whole_params=True
    )
    assert any("S(1)" in layout.outputs for layout in layouts)
    for layout in layouts:
        assert set(layout.params) <= {"R"}
        program = graph.classes[layout.class_index].bind(2)
        check_lowered(program, layout, 2)


def test_context_parallelism_by_gathered_keys_and_values():
    """D19, M14: with attention pinned to its queries' positions, they meet all keys."""
    graph = captured("gpt")
    block = next(b for b in graph.blocks if "layers" in b.name)
    program = graph.classes[block.class_index].bind(2)
    attention = next(op for op in program.ops if "attention" in op.target)
    layout = propagate_layout(
        block.class_index,
        program,
        2,
        pins={attention.outputs[0]: Shard(2)},
        inputs=[Shard(1)] * len(program.inputs),
        outputs=[Shard(1)] * len(program.outputs),
        whole_params=True,
    )
    local = check_lowered(program, layout, 2)
    found = next(op for op in local.ops if op.target == "planner.causal_attention")
    assert [local.tensor[name].shape[2] for name in found.inputs] == [8, 16, 16]


@pytest.mark.parametrize("name", ["gpt", "hf-llama"])
def test_context_and_tensor_parallelism_together(name):
    """D19, P5: heads on one axis, the sequence on the other, the vocabulary divided too."""
    graph = captured(name)
    tp = propagate_graph(graph, microbatch_size=2, axis_size=2)
    programs = [
        lower(graph.classes[layout.class_index].bind(2), layout, axis_size=2) for layout in tp
    ]
    cp = propagate_graph(
        graph,
        microbatch_size=2,
        axis_size=2,
        boundary=Shard(1),
        programs=programs,
        whole_params=True,
    )
    for tp_layout, cp_layout in zip(tp, cp, strict=True):
        check_on_mesh(graph.classes[tp_layout.class_index].bind(2), tp_layout, cp_layout)


@pytest.mark.parametrize("on_cp", ["S(0),S(0),S(0)->S(0)", "S(2),R,R->S(2)"])
def test_heads_of_queries_on_tp_and_samples_or_positions_on_cp(on_cp):
    """M14: three heads of keys on two ranks of tp; each takes those of its queries."""
    query, key, value = (torch.randn(2, heads, 8, 4, dtype=torch.float64) for heads in (6, 3, 3))
    single = one_op(SDPA, query, key, value, None, 0.0, True, enable_gqa=True)
    by_head = "S(1),R,R->S(1)"
    on_tp = simple(by_head, "S(1),R,R", "S(1)")
    local = lower(single.program, on_tp, axis_size=2)
    assert [op.target for op in local.ops].count(OWN_KEYS) == 2
    inputs, _, output = on_cp.partition("->")
    of_keys = inputs.split(",")[1]
    others = ((op.name, f"{of_keys}->{of_keys}") for op in local.ops if op.name != "op")
    layout = simple("", inputs, output).model_copy(update={"ops": (*others, ("op", on_cp))})
    check_on_mesh(single.program, on_tp, layout)


@pytest.mark.parametrize(
    ("tp", "cp"),
    [
        # What tp gathers, scatters, turns or cuts along a dim, cp cuts inside each of its pieces.
        (("S(1)", "R->R", "R"), ("S(1)", "S(1)->S(1)x2", "S(1)x2->S(1)x2", "S(1)x2")),
        (("S(1)", "R->R", "R"), ("S(1)x2", "S(1)x2->S(1)x4", "S(1)x4->S(1)x4", "S(1)x4")),
        (("R", "S(1)->S(1)", "S(1)"), ("S(1)x2", "S(1)x2->S(1)", "S(1)->S(1)", "S(1)")),
        (("P", "S(1)->S(1)", "S(1)"), ("S(1)x2", "S(1)x2->S(1)", "S(1)->S(1)", "S(1)")),
        (("S(0)", "S(1)->S(1)", "S(1)"), ("S(0)", "S(0)->S(0)x2", "S(0)x2->S(0)x2", "S(0)x2")),
        (("S(0)", "S(1)->S(1)", "S(1)"), ("S(1)x2", "S(1)x2->S(1)", "S(1)->S(1)", "S(1)")),
        (("S(1)x2", "R->R", "R"), ("S(1)x2", "S(1)x2->S(1)x4", "S(1)x4->S(1)x4", "S(1)x4")),
        (
            ("S(1)x2", "S(1)->S(1)", "S(1)"),
            ("S(1)x2", "S(1)x2->S(1)x2", "S(1)x2->S(1)x2", "S(1)x2"),
        ),
    ],
)
def test_a_dim_that_tp_redistributes_is_cut_finer_on_cp(tp, cp):
    """M7, D19: values and gradients, and nothing moves over cp."""
    single = one_op("aten.neg.default", torch.randn(8, 16, dtype=torch.float64))
    on_tp = simple(tp[1], tp[0], tp[2])
    (moved,) = [op for op in lower(single.program, on_tp, axis_size=2).ops if op.name != "op"]
    on_cp = ClassLayout(
        class_index=0,
        inputs=(cp[0],),
        params=(),
        outputs=(cp[3],),
        ops=((moved.name, cp[1]), ("op", cp[2])),
    )
    check_on_mesh(single.program, on_tp, on_cp)


def in_sequence(graph):
    """Layouts on tp with sequences divided, for two samples; the local programs; those on cp."""
    tp = propagate_graph(graph, microbatch_size=2, axis_size=2, boundary=Shard(1))
    programs = [
        lower(graph.classes[layout.class_index].bind(2), layout, axis_size=2) for layout in tp
    ]
    return (
        tp,
        programs,
        propagate_on(graph, find_axis("cp"), size=2, microbatch_size=2, programs=programs),
    )


MOVED_BY_A_LAYER = {
    ("tp", "all_gather"): 2,  # the input of attention and of the MLP
    ("tp", "reduce_scatter"): 2,  # their outputs
    ("cp", "all_gather"): 2,  # keys and values
}
TURNED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@pytest.mark.parametrize(("name", "heads"), [("gpt", 2), ("hf-llama", 1), ("hf-gpt2", 2)])
def test_sequence_parallelism_inside_context_parallelism(name, heads):
    """D7, D19, M10: a rank has 1/(cp tp) of the positions between matmuls; over cp go keys and
    values alone, of their own heads and not of all that share them, and their gradients back.
    """
    graph = captured(name)
    tp, programs, cp = in_sequence(graph)
    lowered = [
        lower(program, layout, axis="cp", axis_size=2, sum_later=True)
        for program, layout in zip(programs, cp, strict=True)
    ]
    for on_tp, on_cp, program in zip(tp, cp, lowered, strict=True):
        check_on_mesh(graph.classes[on_tp.class_index].bind(2), on_tp, on_cp, program)
    layer = next(b.class_index for b in graph.blocks if "layers" in b.name or ".h." in b.name)
    local = lowered[layer]
    forward, backward = Counter(), Counter()
    for op in local.ops:
        if op.target == REDISTRIBUTE and local.tensor[op.inputs[0]].kind != "param":
            axis, ((ahead, back), payload) = op.args[1], op_collectives(op, local.tensor, 2)
            if axis == "cp" and ahead is not None:
                samples, positions, head_size, itemsize = 2, 16, 8, 8
                assert payload == samples * heads * positions * head_size * itemsize
            forward.update([(axis, ahead)] * (ahead is not None))
            if local.tensor[op.inputs[0]].requires_grad:
                backward.update([(axis, back)] * (back is not None))
    assert forward == MOVED_BY_A_LAYER
    assert backward == {(axis, TURNED[kind]): n for (axis, kind), n in MOVED_BY_A_LAYER.items()}
    assert {local.tensor[name].shape[1] for name in (local.inputs[0], local.outputs[0])} == {4}


def test_layouts_on_both_axes_suit_a_smaller_microbatch():
    """G4, D19: rows that are cut by sample, and tp's pieces inside each, are as many as samples."""
    graph = captured("hf-gpt2")
    tp, programs, cp = in_sequence(graph)
    plan = default_plan(graph, cp=2, tp=2, microbatch_size=2)
    plan = plan.model_copy(update={"layouts": (*tp, *cp)})
    layer = next(b.class_index for b in graph.blocks if ".h." in b.name)
    assert {"S(0)x2", "S(0)x4"} <= {p for _, text in cp[layer].ops for p in re.split(",|->", text)}
    for program, on_tp, on_cp in zip(graph.classes, tp, cp, strict=True):
        index = on_tp.class_index
        full = local_program(graph, plan, index, degrees=plan.degrees, microbatch_size=2)
        assert full == lower(programs[index], on_cp, axis="cp", axis_size=2, sum_later=True)
        local = local_program(graph, plan, index, degrees=plan.degrees, microbatch_size=1)
        check_on_mesh(program.bind(1), on_tp, on_cp, local)


_ONE_AT_A_TIME = threading.Lock()


@pytest.mark.parametrize(
    ("op", "tp", "cp", "num_streams"),
    [
        ("dropout", "S(1)->S(1)", "S(0)->S(0)", 4),
        ("dropout", "S(1)->S(1)", "", 2),
        ("dropout", "", "S(0)->S(0)", 2),
        ("attention", "S(1),S(1),S(1)->S(1)", "S(2),R,R->S(2)", 4),
        ("causal attention", "S(1),S(1),S(1)->S(1)", "S(2),R,R->S(2)", 4),
        ("causal attention", "S(1),S(1),S(1)->S(1)", "S(2)x2,R,R->S(2)x2", 4),
        ("causal attention", "S(1),S(1),S(1)->S(1)", "", 2),
    ],
)
def test_dropout_differs_on_all_shards_of_two_axes(op, tp, cp, num_streams):
    """M5, D19: as many masks as there are shards; ranks with the same shard draw the same."""
    if op == "dropout":
        single = one_op("aten.dropout.default", torch.ones(16, 16, dtype=torch.float64), 0.5, True)
    else:
        heads = [torch.ones(2, 4, 8, 4, dtype=torch.float64) for _ in range(3)]
        args = (*heads, None, 0.5, op == "causal attention")
        single = one_op("aten.scaled_dot_product_attention.default", *args)
    whole_inputs = ",".join("R" for _ in single.inputs)
    layouts = []
    for text in (tp, cp):
        inputs, _, output = (text or f"{whole_inputs}->R").partition("->")
        layouts.append(simple(text, inputs, output))
    local = lower(
        lower(single.program, layouts[0], axis_size=2), layouts[1], axis="cp", axis_size=2
    )
    shapes = [local.tensor[name].shape for name in local.inputs]

    def body(rank):
        groups = axis_groups(rank)
        module = to_graph_module(local, groups, torch.device("cpu"))
        # Threads share one generator: each seeds it and draws while the others wait.
        with _ONE_AT_A_TIME:
            torch.manual_seed(3)
            (y,) = module(*(torch.ones(shape, dtype=torch.float64) for shape in shapes))
        # Which positions are seen differs with causal attention; the last sees all of its own.
        return (y if op == "dropout" else y[..., -1, 0].round(decimals=9)).flatten().tolist()

    found = on_ranks(4, body)
    assert len({tuple(values) for values in found}) == num_streams
