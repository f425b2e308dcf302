"""Propagation finds the known good layouts, honours pins and stays near the optimum."""

from __future__ import annotations

import itertools

import pytest

from planner.errors import LayoutError
from planner.language.graph import Op, Program, Ref, TensorMeta
from planner.language.layout.pins import parse_pin
from planner.language.layout.placement import OpSharding, Placement, Replicate, Shard
from planner.language.layout.redistribute import REDISTRIBUTE, op_collectives
from planner.language.lowering.beam import BeamSearch, State
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_graph, propagate_layout
from planner.language.ops.registry import strategies
from planner.language.plan import ClassLayout
from tests.builders import VOCABULARY
from tests.sharding.models import captured
from tests.sharding.programs import check_lowered


def layout_by_fqn(name: str, block: str, **options) -> tuple[dict[str, str], Program]:
    """Placements of the params of one block by qualified name, and its local program."""
    graph = captured(name)
    layouts = propagate_graph(graph, microbatch_size=2, axis_size=2, **options)
    found = next(b for b in graph.blocks if block in b.name)
    layout = layouts[found.class_index]
    names = [graph.tensor[n].fqn for n in found.params]
    local = lower(graph.classes[found.class_index].bind(2), layout, axis_size=2)
    return dict(zip(names, layout.params, strict=True)), local


def collectives_of(program: Program) -> tuple[list[str], list[str]]:
    """Kinds of collectives a local program runs forward and backward on large activations."""
    forward, backward = [], []
    for op in program.ops:
        if op.target == REDISTRIBUTE and len(program.tensor[op.outputs[0]].shape) > 1:
            kinds, _ = op_collectives(op, program.tensor, 2)
            forward += [kinds[0]] if kinds[0] else []
            backward += [kinds[1]] if kinds[1] else []
    return forward, backward


def test_llama_layer_is_split_by_column_then_row():
    """P2, D8, D22: without annotations, q, k, v, gate, up by column and o, down by row."""
    placements, local = layout_by_fqn("hf-llama", "layers.0")
    by_column = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    for fqn, placement in placements.items():
        module = fqn.split(".")[-2]
        expected = "S(0)" if module in by_column else "S(1)" if module.endswith("proj") else "R"
        assert (fqn, placement) == (fqn, expected)
    # Two sums forward (after o and down), two backward (before q, k, v and gate, up), or
    # each as a scatter and a gather.
    forward, backward = collectives_of(local)
    for kinds in (forward, backward):
        whole = kinds.count("all_reduce")
        halves = kinds.count("reduce_scatter") + kinds.count("all_gather")
        assert whole + halves / 2 == 2, kinds


def test_vocabulary_is_divided_from_embedding_to_loss():
    """P2, M26: logits stay divided; cross entropy exchanges sums, not logits."""
    placements, local = layout_by_fqn("hf-llama", "norm")
    assert placements["lm_head.weight"] == "S(0)"
    assert "planner.vocab_cross_entropy" in [op.target for op in local.ops]
    assert all(VOCABULARY not in tensor.shape for tensor in local.tensors)


def test_tied_embedding_rests_in_one_placement():
    """G8: both classes that use HF GPT-2's tied table agree on where it lies."""
    graph = captured("hf-gpt2")
    layouts = propagate_graph(graph, microbatch_size=2, axis_size=2)
    found: dict[str, set[str]] = {}
    for block in graph.blocks:
        for name, text in zip(block.params, layouts[block.class_index].params, strict=True):
            found.setdefault(name, set()).add(text)
    assert all(len(texts) == 1 for texts in found.values())


def test_sequence_parallelism_falls_out_of_the_rules():
    """D19: with Shard(1) boundaries norms run on shards of the sequence, and an all-reduce
    becomes a reduce-scatter and an all-gather."""
    _, local = layout_by_fqn("gpt", "layers.1", boundary=Shard(1))
    norms = [op for op in local.ops if op.target == "aten.layer_norm.default"]
    assert norms
    for op in norms:
        assert local.tensor[op.outputs[0]].shape[1] == 8  # half of the 16 positions
    forward, backward = collectives_of(local)
    assert sorted(forward) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    assert sorted(backward) == sorted(forward)


@pytest.mark.parametrize("name", ["gpt", "hf-llama", "encoder-decoder"])
def test_sequence_parallel_layouts_equal_dense(name):
    """D19: sequence-split norms and dropouts compute what one device computes."""
    graph = captured(name)
    layouts = propagate_graph(graph, microbatch_size=2, axis_size=2, boundary=Shard(1))
    assert any("S(1)" in layout.outputs for layout in layouts)
    for layout in layouts:
        check_lowered(graph.classes[layout.class_index].bind(2), layout, 2)


# -- pins --------------------------------------------------------------------------------------


def test_a_pin_is_honoured_and_the_rest_follows():
    """M14, M15: with the first weight fixed by row, the result takes it so and stays right."""
    pin = parse_pin("layers.*.up: S(1)@tp")
    placements, local = layout_by_fqn("gpt", "layers.1", pins=[pin])
    assert placements["layers.1.up.weight"] == "S(1)"
    up = next(op for op in local.ops if "up" in op.module and "linear" in op.target)
    assert local.tensor[up.inputs[1]].shape == (128, 16)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["layers.*.upp: S(0)@tp"], r"matches no parameter; did you mean layers\.\d\.\w+"),
        (["layers.*.up: S(0)@tp", "layers.*.up.*: S(1)@tp"], "disagree about layers.0.up.weight"),
        (["layers.1.up: S(0)@tp"], "equal blocks share one layout; widen it"),
        (
            ["layers.*.norm1: S(0)@tp"],
            r"pins \w+: S\(0\) can't be honoured together by layer_norm.*which runs as R,R,R->R",
        ),
        (
            ["layers.*.up.weight: S(0)@tp", "layers.*.up.bias: R@tp"],
            r"pins \w+: S\(0\) and \w+: R can't be honoured together by linear",
        ),
    ],
)
def test_pins_that_cannot_be_honoured_name_what_clashes(pins, message):
    """M14: an infeasible pin gives the conflicting constraints."""
    with pytest.raises(LayoutError, match=message):
        propagate_graph(
            captured("gpt"), microbatch_size=2, axis_size=2, pins=[parse_pin(p) for p in pins]
        )


def test_a_pin_that_does_not_divide_says_what_does():
    """M8, M14."""
    with pytest.raises(LayoutError, match=r"can't be placed S\(0\) on 3 ranks; use R"):
        propagate_graph(
            captured("gpt"),
            microbatch_size=2,
            axis_size=3,
            pins=[parse_pin("layers.*.up: S(0)@tp")],
        )


@pytest.mark.parametrize(
    "text", ["layers.up", "up: S(0)", "up: S(0)@dp", "up: X@tp", "up: P@tp", ": R@tp"]
)
def test_malformed_pins_are_refused(text):
    """M14."""
    with pytest.raises(LayoutError, match=r"write it like|unknown; use|can't rest"):
        parse_pin(text)


# -- against brute force -----------------------------------------------------------------------


def chain(*widths: int, rows: int = 8) -> Program:
    """Linear and relu, alternating: x @ w0.T, relu, @ w1.T, …"""
    tensors = [meta("x", (rows, widths[0]), "activation")]
    ops = []
    value = "x"
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        tensors.append(meta(f"w{i}", (after, before), "param"))
        tensors.append(meta(f"y{i}", (rows, after), "activation"))
        ops.append(op(f"y{i}", "aten.linear.default", value, f"w{i}"))
        value = f"y{i}"
        if i + 2 < len(widths):
            tensors.append(meta(f"r{i}", (rows, after), "activation"))
            ops.append(op(f"r{i}", "aten.relu.default", value))
            value = f"r{i}"
    params = tuple(f"w{i}" for i in range(len(widths) - 1))
    return Program(
        name="chain",
        inputs=("x",),
        params=params,
        outputs=(value,),
        tensors=tuple(tensors),
        ops=tuple(ops),
    )


def meta(name: str, shape: tuple[int, ...], kind) -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype="float64", kind=kind, requires_grad=True)


def op(name: str, target: str, *inputs: str) -> Op:
    return Op(name=name, target=target, args=tuple(Ref(i) for i in inputs), outputs=(name,))


def cost_of(search: BeamSearch, choice: dict[str, OpSharding]) -> float:
    """The cost of one complete choice, by the search's own arithmetic, without any pruning."""
    state = State(0.0, {"x": Replicate()}, frozenset())
    for step in search._steps():
        sharding = choice[step.op.name]
        cost = next(c for s, c in step.options if s == sharding)
        state = search._take(state, step, sharding, cost)
    (output,) = search.program.outputs
    return search._fetch(state, output, Replicate(), grad_partial=False).cost


@pytest.mark.parametrize(
    "widths", [(8, 32, 8), (16, 16, 16), (8, 6, 4, 8), (2, 64, 2), (32, 4, 32)]
)
def test_no_worse_than_brute_force(widths):
    """M15: total cost equals the best of every combination on small graphs."""
    program = chain(*widths)
    search = BeamSearch(program=program, axis_size=2)
    options = [strategies(o, program.tensor, 2) for o in program.ops]
    best = min(
        cost_of(search, dict(zip([o.name for o in program.ops], choice, strict=True)))
        for choice in itertools.product(*options)
    )
    outputs: dict[str, Placement] = {program.outputs[0]: Replicate()}
    found = search.run({"x": Replicate()}, outputs)
    assert found.cost == pytest.approx(best)


def test_a_partial_sum_is_reduced_before_relu():
    """D5, D6, D7: C = A B with A replicated and B by row: A is sliced to Shard(1), C is
    Partial, and one all-reduce comes before relu."""
    program = Program(
        name="d5",
        inputs=("a",),
        params=("b",),
        outputs=("d",),
        tensors=(
            meta("a", (4, 8), "activation"),
            meta("b", (8, 6), "param"),
            meta("c", (4, 6), "activation"),
            meta("d", (4, 6), "activation"),
        ),
        ops=(op("c", "aten.mm.default", "a", "b"), op("d", "aten.relu.default", "c")),
    )
    layout = propagate_layout(0, program, 2, pins={"b": Shard(0)})
    assert dict(layout.ops)["c"] == "S(1),S(0)->P"
    local = check_lowered(program, layout, 2)
    moves = [o.args[2:4] for o in local.ops if o.target == REDISTRIBUTE]
    assert moves == [("R", "S(1)"), ("P", "R")]


def test_layouts_survive_the_plan_file():
    """P13: a layout reads back equal, ops and placements."""
    for layout in propagate_graph(captured("gpt"), microbatch_size=2, axis_size=2):
        assert ClassLayout.model_validate_json(layout.model_dump_json()) == layout
