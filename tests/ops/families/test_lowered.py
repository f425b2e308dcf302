"""Redistributions of one axis under another: pieces of a cut dim are cut finer, in place."""

from __future__ import annotations

import pytest
import torch

from planner.language.graph import Op, Program, Ref
from planner.language.layout.placement import Replicate, Shard
from planner.language.ops.families.lowered import is_view_slice, staging_bytes
from tests.ops.calls import offered
from tests.sharding.programs import OneOp, meta_of


def moved(src: str, dst: str, before: tuple[int, ...], after: tuple[int, ...]) -> OneOp:
    op = Op(
        name="op",
        target="planner.redistribute",
        args=(Ref("x0"), "tp", src, dst, False),
        outputs=("y0",),
    )
    x, y = torch.ones(before), torch.ones(after)
    program = Program(
        name="p",
        inputs=("x0",),
        params=(),
        outputs=("y0",),
        tensors=(meta_of("x0", x), meta_of("y0", y)),
        ops=(op,),
    )
    return OneOp(program, (x,))


def test_each_piece_of_a_gathered_dim_is_cut_on_its_own():
    """Two pieces of 4 side by side: what is one run in a piece is two in the whole of 8."""
    gathered = moved("S(1)", "R", (6, 4), (6, 8))
    assert offered(gathered) == {"S(0)->S(0)", "S(1)->S(1)x2", "P->P"}


@pytest.mark.parametrize(
    ("src", "dst", "forward", "expected"),
    [
        ("S(0)", "R", True, 0),  # a collective cuts dim 0 itself
        ("S(1)", "R", True, 100),
        ("S(1)", "S(0)", True, 200),
        ("P", "R", True, 0),
    ],
)
def test_cuts_of_inner_dims_are_put_side_by_side(src, dst, forward, expected):
    from planner.language.layout.placement import parse_placement

    ends = parse_placement(src), parse_placement(dst)
    assert staging_bytes(*ends, 100, forward=forward) == expected


def test_a_slice_of_the_outermost_dim_keeps_the_wholes_memory():
    assert is_view_slice(Replicate(), Shard(0), (4, 6))
    assert is_view_slice(Replicate(), Shard(1), (1, 6))
    assert not is_view_slice(Replicate(), Shard(1), (4, 6))
    assert not is_view_slice(Replicate(), Shard(0, 2), (4, 6))
