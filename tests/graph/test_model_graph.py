"""A graph as plain data: sizes by microbatch, programs cut to what is wanted, JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.language.graph.model_graph import (
    Affine,
    Block,
    ModelGraph,
    Op,
    Program,
    Ref,
    Symbol,
    TensorMeta,
    from_json,
    size_at,
    to_json,
)


def tensor(name: str, *shape, kind="activation", fqn: str = "") -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype="float32", kind=kind, fqn=fqn)


def op(name: str, *inputs: str, line: str = "") -> Op:
    refs = tuple(map(Ref, inputs))
    return Op(name=name, target="aten.x.default", args=(refs, 2), outputs=(name,), line=line)


PROGRAM = Program(
    name="layers.*",
    inputs=("x",),
    params=("w", "b"),
    outputs=("z",),
    tensors=(
        tensor("x", Affine(2, 1), 4, kind="input"),
        tensor("w", 4, kind="param"),
        tensor("b", 4, kind="param"),
        tensor("y", Affine(2, 1), 4),
        tensor("z", Affine(2, 1), 4),
    ),
    ops=(op("y", "x", "w"), op("z", "y", "b"), op("unused", "y")),
)


def graph(line: str = "") -> ModelGraph:
    blocks = tuple(
        Block(
            index=i,
            name=f"layers.{i}",
            class_index=0,
            inputs=("in",) if not i else (f"h{i - 1}",),
            params=("w", f"b{i}"),
            outputs=(f"h{i}",),
        )
        for i in range(3)
    )
    return ModelGraph(
        name="m",
        tensors=(
            tensor("in", Affine(2, 1), 4, kind="input", fqn="x"),
            *(tensor(n, 4, kind="param", fqn=n) for n in ("w", "b0", "b1", "b2")),
            *(tensor(f"h{i}", Affine(2, 1), 4) for i in range(3)),
        ),
        batch_inputs=("in",),
        batch_tree={"dict": {"x": {"tensor": "x"}}},
        preamble=replace(PROGRAM, inputs=(), params=(), outputs=(), tensors=(), ops=()),
        blocks=blocks,
        classes=(replace(PROGRAM, ops=tuple(replace(o, line=line) for o in PROGRAM.ops)),),
        loss="h2",
    )


def test_sizes_are_affine_in_the_microbatch():
    x = PROGRAM.tensor["x"]
    assert [size_at(s, 3) for s in x.shape] == [7, 4]
    assert (x.numel_at(3), x.bytes_at(3)) == (28, 112)
    assert x.bind(3).shape == (7, 4)
    fixed = PROGRAM.tensor["w"]
    assert fixed.bind(3) is fixed


def test_an_op_names_its_tensors_in_order_and_binds_its_sizes():
    made = replace(op("y", "b", "a", "b"), kwargs=(("size", (Affine(2), Ref("c"))),))
    assert made.inputs == ("b", "a", "b", "c")
    assert made.bind(3).kwargs == (("size", (6, Ref("c"))),)
    assert op("y", "a").bind(3) is not None
    renamed = made.rename(str.upper)
    assert (renamed.inputs, renamed.outputs) == (("B", "A", "B", "C"), ("Y",))


def test_a_program_is_cut_to_what_an_output_needs():
    part = PROGRAM.only(("y",))
    assert [o.name for o in part.ops] == ["y"]
    assert (part.inputs, part.params) == (("x",), ("w",))
    assert set(part.tensor) == {"x", "w", "y"}


def test_a_parameter_of_several_blocks_is_shared():
    model = graph()
    assert model.shared_params == {"w": (0, 1, 2)}
    assert model.producer == {"h0": 0, "h1": 1, "h2": 2}
    assert model.num_params() == 16


def test_lines_decide_nothing_and_structure_does():
    assert graph("a.py:1").fingerprint == graph("b.py:9").fingerprint
    assert replace(graph(), loss="h1").fingerprint != graph().fingerprint


def test_json_and_back():
    values = (Affine(2, 1), Ref("x"), Symbol("dtype", "float32"), None, True, 1.5, ("a", ()))
    assert from_json(json.loads(json.dumps(to_json(values)))) == values
    model = graph("a.py:1")
    back = from_json(json.loads(json.dumps(to_json(model))))
    assert back == model
    assert back.classes[0].ops[0].line == "a.py:1"
    with pytest.raises(ValueError, match="unknown record 'Job'"):
        from_json({"t": "Job"})
