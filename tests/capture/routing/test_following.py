"""Small questions about ops of routing: what a tensor is another form of, sizes, casts."""

from __future__ import annotations

import pytest

from planner.capture.routing.following import Following, is_growing, keeps_numbers, root_of, times
from planner.capture.routing.values import Blank, InOrder, Order, Rows, sort_of
from planner.language.graph import Affine, Op, Ref, TensorMeta

DTYPES = {"experts": "int64", "probs": "float32"}


def chain(source: str, *steps: tuple[str, str]) -> tuple[dict[str, Op], dict[str, TensorMeta]]:
    """Ops (packet, dtype of the result) one after the other: t0, t1, ..."""
    ops, tensors, name = {}, {n: meta(n, dtype) for n, dtype in DTYPES.items()}, source
    for number, (packet, dtype) in enumerate(steps):
        made = f"t{number}"
        ops[made] = Op(
            name=made, target=f"aten.{packet}.default", args=(Ref(name),), outputs=(made,)
        )
        tensors[made] = meta(made, dtype)
        name = made
    return ops, tensors


def meta(name: str, dtype: str = "int64", *shape: int | Affine) -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype=dtype, kind="activation")


@pytest.mark.parametrize(
    ("source", "steps", "root", "root_of_casts"),
    [
        ("experts", [("view", "int64"), ("clone", "int64")], "experts", "experts"),
        ("experts", [("reshape", "int64"), ("detach", "int64")], "experts", "experts"),
        ("experts", [("to", "int32"), ("view", "int32")], "t0", "experts"),
        ("experts", [("to", "float32")], "t0", "experts"),
        ("experts", [("to", "bfloat16")], "t0", "t0"),  # 257 would be 256
        ("experts", [("add", "int64"), ("flatten", "int64")], "t0", "t0"),
        ("probs", [("detach", "float32")], "t0", "t0"),  # has no gradient any more
        ("experts", [], "experts", "experts"),
    ],
)
def test_the_tensor_whose_entries_another_has(source, steps, root, root_of_casts):
    ops, tensors = chain(source, *steps)
    end = f"t{len(steps) - 1}" if steps else source
    assert root_of(end, ops, tensors) == root
    assert root_of(end, ops, tensors, casts=True) == root_of_casts


@pytest.mark.parametrize(
    ("source", "made", "keeps"),
    [("int64", "int32", True), ("int64", "uint8", False), ("float16", "float32", False)],
)
def test_casts_that_keep_numbers_of_experts(source, made, keeps):
    tensors = {"a": meta("a", source), "b": meta("b", made)}
    cast = Op(name="b", target="aten.to.dtype", args=(Ref("a"),), outputs=("b",))
    assert keeps_numbers(cast, tensors) is keeps


def test_sizes_times_a_number():
    for size in (Affine(per_sample=3, fixed=2), Affine(per_sample=1, fixed=0), 5):
        for samples in (1, 2, 7):
            at = size.at(samples) if isinstance(size, Affine) else size
            many = times(size, 4)
            assert (many.at(samples) if isinstance(many, Affine) else many) == 4 * at
    assert is_growing(meta("a", "int64", 2, Affine(per_sample=1, fixed=0)))
    assert not is_growing(meta("a", "int64", 2, 3))


def test_what_an_op_is_followed_with():
    op = Op(
        name="y",
        target="aten.gather.default",
        args=(Ref("rows"), -1, Ref("order")),
        kwargs=(("sparse_grad", True),),
        outputs=("y",),
    )
    tensors = {n: meta(n, "float32", 4, 2) for n in ("rows", "order", "y")}
    known = {"rows": Rows(sort="s"), "order": Order(sort="s")}
    following = Following(op=op, tensors=tensors, known=known, makers={})
    assert following.dim(1) == 1
    assert following.dim(5, "other", 0) == 0
    assert (following.arg(3, "sparse_grad"), following.arg(4, "none", 7)) == (True, 7)
    assert following.of(Ref("order")) == Order(sort="s")
    assert following.of(3) is None
    assert (following.sorts, following.rows) == ({"s"}, ["rows"])
    assert following.made.name == "y"
    assert (sort_of(InOrder(sort="s")), sort_of(Blank(zeros=True)), sort_of(None)) == (
        "s",
        None,
        None,
    )
