"""Indexing: an indexed dim stays whole, the dims of the indices may be cut where they read."""

from __future__ import annotations

import torch

from planner.language.ops.families.shapes import indexing
from tests.ops.calls import kernel_call, offered, saved
from tests.sharding.programs import one_op

ROWS = torch.zeros(2, dtype=torch.long)


ones = torch.ones


def test_reading_may_be_cut_by_index():
    chosen = one_op("aten.index.Tensor", ones(2, 4, 6), [None, ROWS])
    assert offered(chosen) == {"S(0),R->S(0)", "R,S(0)->S(1)", "S(2),R->S(2)", "P,R->P"}
    gathered = one_op("aten.gather.default", ones(2, 4), 1, torch.zeros(2, 4, dtype=torch.long))
    assert offered(gathered) == {"S(0),S(0)->S(0)", "R,S(1)->S(1)", "P,R->P"}


def test_indices_that_are_apart_come_first():
    """x[i, :, j] has the indices' dim in front, as numpy has it."""
    apart = one_op("aten.index.Tensor", ones(4, 6, 8), [ROWS, None, ROWS + 1])
    assert "S(1),R,R->S(1)" in offered(apart)
    assert "R,S(0),S(0)->S(0)" in offered(apart)


def test_a_mask_gives_a_size_that_nobody_can_tell():
    assert not offered(one_op("aten.index.Tensor", ones(2, 4), [ones(2, 4) > 0]))


def test_writing_leaves_indices_whole():
    put = one_op("aten.index_put.default", ones(4, 6), [ROWS], ones(2, 6))
    assert offered(put) == {"S(1),R,S(1)->S(1)"}
    assert indexing._indices_written_to(kernel_call(put)).tensors == ("x1",)
    added = one_op(
        "aten.scatter_add.default", ones(2, 4), 1, torch.zeros(2, 4, dtype=torch.long), ones(2, 4)
    )
    assert "P,R,P->P" in offered(added)
    assert saved(added).tensors == ("x1",)
