"""Views: a cut of a flat dim seen from both sides, and the strides of what shares memory."""

from __future__ import annotations

import torch

from planner.language.graph import Op, Ref
from planner.language.ops.families.shapes.views import dim_groups, dim_order, reshape_placements
from tests.ops.calls import offered, on_shard, view
from tests.sharding.programs import one_op

ones = torch.ones


def test_groups_of_dims_hold_the_same_elements():
    assert list(dim_groups((6, 4, 5), (3, 2, 20))) == [([0], [0, 1]), ([1, 2], [2])]
    assert list(dim_groups((2, 1), (2,))) == [([0], [0]), ([1], [])]


def test_a_cut_inside_a_flat_dim_is_a_cut_in_segments():
    """4 heads of 6 in a hidden dim of 24: cutting inside heads cuts it in 4 segments."""
    found = {f"{a}->{b}" for a, b in reshape_placements((2, 4, 6), (2, 24), 2)}
    assert found == {"S(0)->S(0)", "S(1)->S(1)", "S(2)->S(1)x4"}
    back = one_op("aten.view.default", ones(2, 24), [2, 4, 6])
    ((target, args),) = on_shard(back, "S(1)->S(1)")
    assert (target, args[1]) == ("aten.reshape.default", (2, 2, 6))


def test_permuted_dims_take_their_strides_along():
    turned = one_op("aten.permute.default", ones(2, 4, 6), [2, 0, 1])
    assert offered(turned) == {"S(0)->S(1)", "S(1)->S(2)", "S(2)->S(0)", "P->P"}
    assert view(turned) == ("x0", (1, 24, 6))


def test_orders_of_dims():
    def order(name: str, *args) -> list[int]:
        op = Op(name="y", target=f"aten.{name}.x", args=(Ref("x"), *args), outputs=("y",))
        return dim_order(op, 3)

    assert order("transpose", 0, -1) == [2, 1, 0]
    assert order("movedim", (0,), (2,)) == [1, 2, 0]
    assert order("mT") == [0, 2, 1]
    assert order("numpy_T") == [2, 1, 0]


def test_a_stretched_dim_has_stride_zero_and_can_be_stretched_less():
    wide = one_op("aten.expand.default", ones(2, 1), [3, 2, 4])
    assert view(wide) == ("x0", (0, 1, 0))
    assert "R->S(2)" in offered(wide)


def test_a_reshape_that_strides_forbid_is_a_copy():
    assert view(one_op("aten.reshape.default", ones(2, 4).t(), [8])) is None
    assert view(one_op("aten.reshape.default", ones(2, 4), [8])) == ("x0", (1,))
