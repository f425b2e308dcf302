"""Ranks in a box with named axes."""

from __future__ import annotations

import pytest

from planner.errors import LayoutError
from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh


def test_mesh_of_any_order():
    """D1, D2: the mesh [[2, 4, 5], [0, 1, 3]] and a (4, 3) tensor, Shard(0) and Shard(1)."""
    mesh = ProcessMesh(axes=("x", "y"), shape=(2, 3), ranks=(2, 4, 5, 0, 1, 3))
    assert mesh.coordinate(4) == (0, 1)
    piece = piece_of((4, 3), Placements((("x", Shard(0)), ("y", Shard(1)))), mesh, 4)
    assert piece.local_shape == (2, 1)
    assert piece.span == ((0, 2), (1, 2))
    assert list(mesh.groups("x")) == [(2, 0), (4, 1), (5, 3)]
    assert list(mesh.groups("y")) == [(2, 4, 5), (0, 1, 3)]


@pytest.mark.parametrize(
    ("axes", "shape", "ranks", "message"),
    [
        (("x",), (2, 2), (0, 1, 2, 3), "each axis needs one size"),
        (("x", "x"), (2, 2), (0, 1, 2, 3), "a name of its own"),
        (("x",), (4,), (0, 1, 2), "needs 4 different ranks; 3 given"),
        (("x",), (2,), (1, 1), "needs 2 different ranks"),
    ],
)
def test_a_mesh_that_does_not_hold_together_is_refused(axes, shape, ranks, message):
    """D1."""
    with pytest.raises(LayoutError, match=message):
        ProcessMesh(axes=axes, shape=shape, ranks=ranks)


def test_a_rank_of_another_mesh_is_refused():
    mesh = ProcessMesh(axes=("x",), shape=(2,), ranks=(4, 5))
    with pytest.raises(LayoutError, match="rank 0 is not in the mesh of ranks"):
        mesh.coordinate(0)
