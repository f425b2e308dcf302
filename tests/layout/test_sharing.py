"""Who shares a parameter, against the pieces that ranks hold."""

from __future__ import annotations

from collections import defaultdict

import pytest

from planner.language.layout.axes import Degrees
from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import Replicate, Shard
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.layout.sharing import sharing

SIZES = Degrees(rp=2, dp=2, cp=2, tp=2)
MESH = ProcessMesh(
    axes=tuple(SIZES), shape=tuple(SIZES.values()), ranks=tuple(range(SIZES.num_ranks))
)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("tp", [Replicate(), Shard(0), Shard(1, 3)])
def test_ranks_that_differ_along_alike_axes_alone_hold_the_same_piece(tp, is_sharded):
    """D1: HSDP's copies too; ranks that differ along any other axis hold another piece."""
    placements = Placements.of({"tp": tp})
    shared = sharing(placements, is_sharded=is_sharded)
    by_piece = defaultdict(set)
    for rank in MESH.ranks:
        piece = piece_of((48, 12), placements, MESH, rank, shared.chunked)
        by_piece[piece].add(rank)
    (copies,) = {len(ranks) for ranks in by_piece.values()}
    assert copies == MESH.size(*shared.alike)
    lines = {frozenset(line) for line in MESH.groups(*shared.alike)}
    assert {frozenset(ranks) for ranks in by_piece.values()} == lines


def test_a_parameter_that_nothing_cuts_is_alike_everywhere():
    shared = sharing(Placements(), is_sharded=False)
    assert (shared.cut, shared.chunked) == ((), ())
    assert set(shared.alike) == set(MESH.axes)
