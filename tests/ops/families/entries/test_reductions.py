"""Reductions: a sum of a shard is a term of the sum, a mean too once it is scaled."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.families.entries import reductions
from tests.ops.calls import kernel_call, offered, on_shard, saved
from tests.sharding.programs import one_op

ones = torch.ones


def test_a_mean_of_a_shard_is_divided_by_the_number_of_shards():
    mean = one_op("aten.mean.dim", ones(2, 4), [1])
    assert offered(mean) == {"S(0)->S(0)", "S(1)->P", "P->P"}
    first, scale = on_shard(mean, "S(1)->P")
    assert (first[0], scale[0], scale[1][1]) == ("aten.mean.dim", "aten.mul.Tensor", 0.5)
    assert len(on_shard(mean, "S(0)->S(0)")) == 1


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        ("aten.amax.default", ([1],), {"S(0)->S(0)"}),
        ("aten.softmax.int", (1,), {"S(0)->S(0)"}),
        ("aten.topk.default", (2,), {"S(0)->S(0),S(0)"}),
        ("aten.sum.default", (), {"S(0)->P", "S(1)->P", "P->P"}),
        ("aten.flip.default", ([0],), {"S(1)->S(1)"}),
    ],
)
def test_dims_that_an_op_mixes_stay_whole(target, args, expected):
    assert offered(one_op(target, ones(2, 4), *args)) == expected


def test_counts_add_up_between_given_bounds_only():
    assert offered(one_op("aten.histc.default", ones(4), 4, 0.0, 2.0)) == {"S(0)->P"}
    assert offered(one_op("aten.histc.default", ones(4), 4)) == set()


def test_an_extreme_saves_where_it_was():
    along = one_op("aten.max.dim", ones(2, 4), 1)
    assert saved(along).tensors == ("y1",)
    of_all = one_op("aten.max.default", ones(2, 4))
    assert reductions._extreme(kernel_call(of_all)).tensors == ("x0", "y0")
