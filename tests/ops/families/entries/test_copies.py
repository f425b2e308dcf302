"""What keeps its entries: views where nothing changes, copies where dtype or memory does."""

from __future__ import annotations

import torch

from planner.language.ops.call import Call
from planner.language.ops.families.entries import copies
from tests.ops.calls import offered, view
from tests.sharding.programs import one_op

MATRIX = torch.ones(2, 4)


def test_a_term_of_a_sum_passes_where_no_number_is_rounded_to_an_integer():
    assert "P->P" in offered(one_op("aten.neg.default", MATRIX))
    assert "P->P" in offered(one_op("aten.to.dtype", MATRIX, torch.bfloat16))
    assert "P->P" not in offered(one_op("aten.to.dtype", MATRIX, torch.int64))


def test_a_cast_to_its_own_dtype_is_its_input():
    same, other = (one_op("aten.to.dtype", MATRIX, d) for d in (torch.float32, torch.float64))
    assert view(same) == ("x0", (4, 1))
    assert view(other) is None
    assert copies._of_one_dtype(Call(same.op, same.program.tensor, 1))


def test_a_row_major_tensor_is_handed_on_by_contiguous():
    assert view(one_op("aten.contiguous.default", MATRIX)) == ("x0", (4, 1))
    assert view(one_op("aten.contiguous.default", MATRIX.t())) is None
    assert view(one_op("aten.clone.default", MATRIX)) is None
