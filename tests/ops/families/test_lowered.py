"""Redistributions of one axis under another: pieces of a cut dim are cut finer, in place."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from planner.language.graph import Op, Program, Ref
from planner.language.layout.placement import OpSharding, Replicate, Shard
from planner.language.ops.call import local_shape
from planner.language.ops.families.lowered import is_view_slice, staging_bytes
from planner.language.ops.registry import local_ops, strategies
from planner.runtime.process import collectives
from planner.runtime.stage.calls.own_random import stream_of
from tests.ops.calls import offered
from tests.sharding.programs import OneOp, meta_of, one_op


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


def test_pairs_of_segments_stay_pairs_over_another_axis():
    """What is mirrored in each of two pieces is mirrored in both side by side; but pieces that are
    mirrored over that axis lie in another order.
    """
    for place, found in (("S(1)", {"S(1)z2->S(1)z4", "S(1)z4->S(1)z8"}), ("S(1)z2", set())):
        gathered = moved(place, "R", (6, 8), (6, 16))
        mirrored = strategies(
            gathered.op, gathered.program.tensor, 2, segments=(2, 4), mirrored=True
        )
        assert {str(s) for s in mirrored if str(s).startswith("S(1)z")} == found


def test_a_random_op_has_a_stream_on_each_rank_of_three_axes():
    """And of no fourth, where it runs whole."""
    single = one_op("aten.dropout.default", torch.ones(8, 8, 8), 0.5, True)
    op, tensor = single.op, dict(single.program.tensor)
    for dim, axis in enumerate(("tp", "hp", "cp")):
        place = OpSharding.parse(f"S({dim})->S({dim})")
        (op,) = local_ops(op, place, tensor, axis=axis, axis_size=2).ops
        tensor = {
            name: replace(meta, shape=local_shape(meta.shape_at(1), Shard(dim), 2))
            for name, meta in tensor.items()
        }
    assert op.args[:2] == ("aten.dropout.default", "cp")
    assert dict(op.kwargs) == {"outer_group": "hp", "outermost_group": "tp"}
    assert len(strategies(op, tensor, 2)) == 1


def test_streams_of_three_groups_are_all_different(monkeypatch):
    place = {}
    monkeypatch.setattr(collectives, "size", {"a": 2, "b": 3, "c": 2, "": 1}.__getitem__)
    monkeypatch.setattr(collectives, "rank", lambda group: place.get(group, 0))
    found = set()
    for numbers in product(range(2), range(3), range(2)):
        place.update(zip("abc", numbers, strict=True))
        found.add(stream_of(*"abc"))
    assert found == set(range(12))
    assert stream_of("b", "", "") == place["b"]
