"""Parts: the dim that is cut stays whole, but for equal parts, which are segments."""

from __future__ import annotations

import torch

from planner.language.ops.families.shapes import parts
from tests.ops.calls import kernel_call, offered, on_shard, view
from tests.sharding.programs import one_op

ones = torch.ones


def test_equal_parts_are_segments():
    halves = one_op("aten.split.Tensor", ones(2, 8), 4, 1)
    assert offered(halves) == {"S(0)->S(0),S(0)", "S(1)x2->S(1),S(1)", "P->P,P"}
    ((_, args),) = on_shard(halves, "S(1)x2->S(1),S(1)")
    assert args[1] == 2
    uneven = one_op("aten.split.Tensor", ones(2, 6), 4, 1)
    assert offered(uneven) == {"S(0)->S(0),S(0)", "P->P,P"}
    joined = one_op("aten.cat.default", [ones(2, 4), ones(2, 4) + 1], 1)
    assert "S(1),S(1)->S(1)x2" in offered(joined)


def test_padding_with_zeros_is_linear():
    assert offered(one_op("aten.constant_pad_nd.default", ones(2, 4), [1, 1], 0)) == {
        "S(0)->S(0)",
        "P->P",
    }
    assert "P->P" not in offered(one_op("aten.constant_pad_nd.default", ones(2, 4), [1, 1], 1.0))


def test_a_slice_of_all_of_a_dim_leaves_it_free():
    whole = one_op("aten.slice.Tensor", ones(2, 4), 1, 0, 4)
    assert "S(1)->S(1)" in offered(whole)
    assert "S(1)->S(1)" not in offered(one_op("aten.slice.Tensor", ones(2, 4), 1, 0, 2))
    assert "S(1)->S(1)" in offered(one_op("aten.repeat_interleave.self_int", ones(2, 4), 2, 1))


def test_strides_of_parts():
    x = ones(4, 6)
    assert view(one_op("aten.slice.Tensor", x, 1, 0, 6, 2)) == ("x0", (6, 2))
    assert view(one_op("aten.select.int", x, 0, 1)) == ("x0", (1,))
    assert view(one_op("aten.unfold.default", x, 1, 4, 2)) == ("x0", (6, 2, 1))
    assert view(one_op("aten.diagonal.default", x)) == ("x0", (7,))
    pairs = one_op("aten.real.default", torch.ones(2, dtype=torch.complex64))
    assert parts._real_part(kernel_call(pairs), 0) == ("x0", (2,))
