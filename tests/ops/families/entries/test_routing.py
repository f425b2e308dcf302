"""Rows in the order of their experts: shards of them are the right shards of the whole."""

from __future__ import annotations

import torch

from planner.language.graph import Op, Ref, TensorMeta
from planner.language.ops.families.entries.routing import GROUPED_MM, SORT_ROWS, UNSORT_ROWS
from planner.language.ops.kernel import KernelCall
from planner.language.ops.record import family_of
from planner.language.ops.registry import strategies

ROWS, WIDTH, CHOSEN, EXPERTS = 8, 4, 2, 3
SHAPES = {
    "rows": (ROWS, WIDTH),
    "experts": (ROWS, CHOSEN),
    "sorted": (ROWS * CHOSEN, WIDTH),
    "order": (ROWS * CHOSEN,),
    "ends": (EXPERTS,),
    "weights": (ROWS, CHOSEN),
    "matrices": (EXPERTS, WIDTH, WIDTH),
    "products": (ROWS * CHOSEN, WIDTH),
    "sums": (ROWS, WIDTH),
}
INTEGERS = {"experts", "order", "ends"}
TENSORS = {
    name: TensorMeta(
        name=name, shape=shape, dtype="int64" if name in INTEGERS else "float32", kind="activation"
    )
    for name, shape in SHAPES.items()
}


def op_of(target: str, inputs: str, outputs: str) -> Op:
    args = tuple(map(Ref, inputs.split()))
    more = (EXPERTS,) if target == SORT_ROWS else ()
    return Op(name="op", target=target, args=(*args, *more), outputs=tuple(outputs.split()))


SORT = op_of(SORT_ROWS, "rows experts", "sorted order ends")
PRODUCTS = op_of(GROUPED_MM, "sorted matrices ends", "products")
UNSORT = op_of(UNSORT_ROWS, "products order weights", "sums")


def offered(op: Op) -> set[str]:
    return {str(sharding) for sharding in strategies(op, TENSORS, 2)[1:]}


def sort_rows(rows, experts):
    """The three calls, as libraries define them."""
    order = experts.flatten().argsort(stable=True)
    ends = experts.flatten().bincount(minlength=EXPERTS).cumsum(0)
    return rows[order // CHOSEN], order, ends


def grouped_mm(rows, matrices, ends):
    starts = [0, *ends.tolist()[:-1]]
    runs = zip(starts, ends.tolist(), matrices, strict=True)
    return torch.cat([rows[start:end] @ matrix for start, end, matrix in runs])


def unsort_rows(rows, order, weights):
    back = torch.empty_like(rows)
    back[order] = rows
    return (back.view(-1, CHOSEN, rows.shape[1]) * weights[..., None]).sum(1)


def test_each_rank_may_put_its_own_rows_in_order_and_back():
    """The rows of ranks one after the other are those of the whole, ends are terms of a sum."""
    assert "S(0),S(0)->S(0),S(0),P" in offered(SORT)
    assert "S(0),R,P->S(0)" in offered(PRODUCTS)
    assert "S(0),S(0),S(0)->S(0)" in offered(UNSORT)
    torch.manual_seed(0)
    rows, matrices = torch.rand(ROWS, WIDTH), torch.rand(EXPERTS, WIDTH, WIDTH)
    experts, weights = torch.randint(EXPERTS, (ROWS, CHOSEN)), torch.rand(ROWS, CHOSEN)

    def layer(rows, experts, weights):
        moved, order, ends = sort_rows(rows, experts)
        return unsort_rows(grouped_mm(moved, matrices, ends), order, weights), ends

    whole, ends = layer(rows, experts, weights)
    parts = [
        layer(*part) for part in zip(*(t.chunk(2) for t in (rows, experts, weights)), strict=True)
    ]
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), whole)
    assert torch.equal(sum(own for _, own in parts), ends)


def test_columns_keep_all_rows_and_their_order():
    """Each rank then has the whole order: only rows are cut."""
    assert "S(1),R->S(1),R,R" in offered(SORT)
    assert "S(1),R,R->S(1)" in offered(UNSORT)
    rows, experts = torch.rand(ROWS, WIDTH), torch.randint(EXPERTS, (ROWS, CHOSEN))
    moved, order, _ = sort_rows(rows, experts)
    for columns, part in zip(rows.chunk(2, 1), moved.chunk(2, 1), strict=True):
        found = sort_rows(columns, experts)
        assert torch.equal(found[0], part)
        assert torch.equal(found[1], order)


def test_the_way_back_saves_what_both_gradients_read():
    """Rows for the gradients of their weights; the way there needs no tensor of its own."""

    def saved(op):
        return family_of(op.target).saved(KernelCall(op, TENSORS, {}, "cuda")).tensors

    assert saved(SORT) == ()
    assert saved(UNSORT) == ("products", "order", "weights")
