"""A global batch found to be one the plan can take, and cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from planner.errors import ModelError
from planner.language.graph import Affine, Op, Program, Ref, TensorMeta
from planner.language.graph.unit import Unit
from planner.language.lowering.defaults import default_plan
from planner.runtime.batches.inputs.feed import Preamble, _reversed, cut_batch, piece_of
from tests.builders import gpt_batch
from tests.captures import capture_tiny


@pytest.fixture(scope="module")
def graph():
    return capture_tiny("gpt")


def test_parts_are_the_users_own_structure(graph):
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2)
    batch = gpt_batch(3)
    cut = cut_batch(batch, graph, plan)
    assert [len(cut.split.microbatch(i)) for i in range(2)] in ([2, 1], [1, 2])
    part = cut.part(range(1, 3))
    assert set(part) == {"ids", "labels"}
    assert torch.equal(part["ids"], batch["ids"][1:3])
    assert torch.equal(cut.reversed().leaves["labels"], batch["labels"].flip(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda b: {k: v[:1] for k, v in b.items()},
            r"has 1 samples; 2 microbatches .* 2 to 4",
        ),
        (
            lambda b: b | {"labels": b["labels"][:2]},
            r"labels has shape \(2, 16\); for 4 samples",
        ),
        (lambda b: {"ids": b["ids"]}, "the batch lacks labels"),
        (lambda b: b | {"mask": b["ids"]}, "the batch has mask in addition"),
        (
            lambda b: b | {"labels": b["labels"] / 2},
            "labels is float32 and the plan was made with int64, to which a cast would change its",
        ),
    ],
)
def test_other_batches_are_refused(graph, change, says):
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2)
    with pytest.raises(ModelError, match=says):
        cut_batch(change(gpt_batch(4)), graph, plan)


def test_several_rows_of_a_sample_go_together():
    meta = TensorMeta(name="x", shape=(Affine(2), 3), dtype="float32", kind="input", fqn="x")
    rows = torch.arange(18.0).view(6, 3)
    assert torch.equal(piece_of(rows, meta, range(1, 3), Unit()), rows[2:6])
    assert torch.equal(_reversed(rows, meta, Unit()), torch.cat([rows[4:6], rows[2:4], rows[0:2]]))
    odd = TensorMeta(name="x", shape=(Affine(1, 1),), dtype="float32", kind="input", fqn="x")
    with pytest.raises(ModelError, match="is 1 per sample plus 1; it can't be cut"):
        piece_of(torch.ones(3), odd, range(1), Unit())


def test_values_of_no_batch_tensor_are_made_once_for_each_size():
    shapes = {"x": (Affine(1), 2), "positions": (Affine(1),), "mask": (Affine(1), 2)}
    program = Program(
        name="preamble",
        inputs=("x",),
        params=(),
        outputs=("positions", "mask"),
        tensors=tuple(
            TensorMeta(name=n, shape=s, dtype="float32", kind="input" if n == "x" else "activation")
            for n, s in shapes.items()
        ),
        ops=(
            Op(name="p", target="aten.arange.default", args=(Affine(1),), outputs=("positions",)),
            Op(name="m", target="aten.relu.default", args=(Ref("x"),), outputs=("mask",)),
        ),
    )
    graph = SimpleNamespace(preamble=program)
    preamble = Preamble(graph, ("mask", "positions", "labels"), {}, torch.device("cpu"))
    assert set(preamble.inputs) == {"labels", "x"}  # what it reads, and what is passed through
    first, again = (preamble({"x": torch.full((2, 2), v), "labels": None}, 2) for v in (1.0, -1.0))
    assert first["positions"] is again["positions"]
    assert (first["mask"].sum(), again["mask"].sum()) == (4, 0)
    larger = preamble({"x": torch.ones(3, 2), "labels": None}, 3)
    assert larger["positions"].tolist() == [0, 1, 2]
