"""Two exports of one model: sizes become affine, and what differs otherwise is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.capture.align import align
from planner.capture.blocks import RawOp
from planner.capture.reading.record import Exported
from planner.errors import CaptureError
from planner.language.graph import Affine, Op, Ref, TensorMeta


def exported(size: int, *args, target: str = "aten.view.default", **changes) -> Exported:
    tensors = {
        "x": TensorMeta(name="x", shape=(size, 4), dtype="float32", kind="input"),
        "c": TensorMeta(name="c", shape=(1,), dtype="float32", kind="constant", data=(1.0,)),
        "y": TensorMeta(name="y", shape=(3 * size - 1,), dtype="float32", kind="activation"),
    }
    op = Op(name="y", target=target, args=(Ref("x"), *args), outputs=("y",))
    raw = (RawOp(op=op, module="layer"),)
    made = Exported(tensors=tensors, inputs=("x",), ops=raw, loss="y", lines=(" at m.py:1: `x`",))
    return replace(made, **changes)


def test_sizes_and_arguments_follow_the_number_of_samples():
    graph = align(exported(2, (5, -1), 7, 2), exported(3, (8, -1), 7, 3))
    assert graph.tensors["x"].shape == (Affine(1, 0), 4)
    assert graph.tensors["y"].shape == (Affine(3, -1),)
    assert graph.ops[0].op.args == (Ref("x"), (Affine(3, -1), -1), 7, Affine(1, 0))


def test_rows_counted_in_floats_are_a_number_of_samples_to_an_op_of_floats():
    """As of Mixtral's auxiliary loss, which counts rows from 0.0 on."""
    small, large = exported(2, 32.0), exported(3, 48.0)
    (divided,) = align(small, large).ops
    assert divided.op.args == (Ref("x"), Affine(16))
    for name in ("x", "y"):  # with integers, 32.0 makes another dtype than 32
        whole = (
            replace(small.tensors[name], dtype="int64"),
            replace(large.tensors[name], dtype="int64"),
        )
        pair = (
            replace(each, tensors=each.tensors | {name: meta})
            for each, meta in zip((small, large), whole, strict=True)
        )
        with pytest.raises(CaptureError, match=r"is 32\.0 for 2 samples and 48\.0 for 3"):
            align(*pair)


@pytest.mark.parametrize(
    ("small", "large", "says"),
    [
        (exported(2), exported(3, ops=()), "runs 1 ops on 2 samples and 0 on 3"),
        (exported(2), exported(3, target="aten.relu.default"), "differs with the batch size"),
        (exported(2, 4), exported(3, 9), "grows as the square"),
        (exported(2, 2), exported(3, 6), "grows as the square"),  # n (n - 1), as of pairs
        (exported(2, 8), exported(3, 27), "grows as the cube"),
        (exported(2, 0.5), exported(3, 1 / 3), r"is 0\.5 for 2 samples and 0\.33"),
        (exported(2, True), exported(3, 1), "must not depend on the batch size"),
    ],
)
def test_what_depends_on_the_batch_otherwise_is_refused_with_its_line(small, large, says):
    with pytest.raises(CaptureError, match=says):
        align(small, large)


def test_tensors_keep_rank_dtype_and_constants():
    for change, says in (
        ({"dtype": "float64"}, "tensor c has another rank or dtype for another batch size"),
        ({"data": (2.0,)}, "constant c is made of other numbers"),
    ):
        other = exported(3)
        tensors = other.tensors | {"c": replace(other.tensors["c"], **change)}
        with pytest.raises(CaptureError, match=says):
            align(exported(2), replace(other, tensors=tensors))
    nan = {"c": replace(exported(2).tensors["c"], data=(float("nan"),))}
    align(*(replace(e, tensors=e.tensors | nan) for e in (exported(2), exported(3))))
