"""Non-linear ops entry by entry: every aligned dim, never a term of a sum."""

from __future__ import annotations

import pytest
import torch

from planner.language.ops.families.entries import nonlinear
from tests.ops.calls import offered, saved
from tests.sharding.programs import one_op

ones = torch.ones


def test_every_aligned_dim_and_no_partial():
    """relu(a + b) is not relu(a) + relu(b)."""
    assert offered(one_op("aten.relu.default", ones(2, 4))) == {"S(0)->S(0)", "S(1)->S(1)"}
    larger = one_op("aten.maximum.default", ones(2, 4), ones(4))
    assert offered(larger) == {"S(0),R->S(0)", "S(1),S(0)->S(1)"}


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        ("aten.relu.default", (), ("y0",)),  # 1 where the result is above zero
        ("aten.gelu.default", (), ("x0",)),
        ("aten.round.default", (), ()),  # its gradient is zero
        ("aten.pow.Tensor_Scalar", (3,), ("x0",)),
        ("aten.pow.Tensor_Scalar", (1,), ()),
    ],
)
def test_what_the_derivative_reads_is_saved(target, args, expected):
    assert saved(one_op(target, ones(2, 4), *args)).tensors == expected


def test_a_slope_of_each_channel_leaves_channels_whole():
    call = nonlinear.Call(*_call("aten.prelu.default", ones(2, 4, 6), ones(4)), 2)
    assert [str(s) for s in nonlinear._prelu(call)] == ["S(0),R->S(0)", "S(2),R->S(2)"]


def _call(target, *args):
    single = one_op(target, *args)
    return single.op, single.program.tensor
