"""What ranks hold of a tensor: pieces of random meshes, and who sends what between meshes."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.language.layout.boxes import box_transfers
from planner.language.layout.pieces import piece_of
from planner.language.layout.placement import Partial, Replicate, Shard, parse_placement
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh

AXES = "xyz"


def mesh(*shape: int, ranks: tuple[int, ...] | None = None) -> ProcessMesh:
    return ProcessMesh(
        axes=tuple(AXES[: len(shape)]), shape=shape, ranks=ranks or tuple(range(prod(shape)))
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_pieces_tile_the_tensor(data):
    """M9: for random placements the pieces of all ranks cover each element equally often."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = tuple(data.draw(st.lists(st.sampled_from([6, 12, 18]), min_size=1, max_size=3)))
    choices = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    placements = Placements(
        tuple((axis, data.draw(st.sampled_from(choices))) for axis in AXES[: len(sizes)])
    )
    on = mesh(*sizes)
    for dim, size in enumerate(shape):
        parts = prod(
            n for n, (_, p) in zip(sizes, placements.pairs, strict=True) if p == Shard(dim)
        )
        if size % parts:
            with pytest.raises(LayoutError, match=f"does not divide dim {dim} of w"):
                piece_of(shape, placements, on, 0, name="w")
            return
    counts = torch.zeros(shape)
    for rank in on.ranks:
        piece = piece_of(shape, placements, on, rank)
        assert tuple(stop - start for start, stop in piece.span) == piece.local_shape
        counts[slices(piece.span)] += 1
    copies = prod(
        n for n, (_, p) in zip(sizes, placements.pairs, strict=True) if not isinstance(p, Shard)
    )
    assert torch.all(counts == copies)


def test_unwhole_splits_are_refused():
    """M8: dim 6 on 4 ranks."""
    with pytest.raises(LayoutError, match=r"x=4 does not divide dim 0 of w \(size 6\)"):
        piece_of((6,), Placements((("x", Shard(0)),)), mesh(4), 0, name="w")
    with pytest.raises(LayoutError, match=r"x=2 does not divide dim 0 of w \(size 6\)"):
        piece_of((6,), Placements((("x", Shard(0, 2)),)), mesh(2), 0, name="w")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("S(0)x2", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("S(0)z2", [(0, 7), (1, 6), (2, 5), (3, 4)]),
    ],
)
def test_pieces_of_segments(text, pieces):
    """Eight pieces on four ranks, in stripes and mirrored: from both ends to the middle."""
    placements = Placements((("x", parse_placement(text)),))
    for rank, (first, second) in enumerate(pieces):
        (runs,) = piece_of((24,), placements, mesh(4), rank).runs
        expected = [*range(3 * first, 3 * first + 3), *range(3 * second, 3 * second + 3)]
        assert [at for start, n in runs for at in range(start, start + n)] == expected


@pytest.mark.parametrize("text", ["R", "P", "S(1)", "S(0)x3", "S(2)z4", "S(0)z20", "O", "O(1)z2"])
def test_placements_are_read_as_they_are_written(text):
    assert str(parse_placement(text)) == text


@pytest.mark.parametrize("text", ["S(0)z3", "S(0)z1", "S(0)z0", "S(0)z", "S(0)x0", "Oz5"])
def test_mirrored_segments_come_in_pairs(text):
    with pytest.raises(LayoutError, match="is unknown"):
        parse_placement(text)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_transfers_are_minimal_and_complete(data):
    """D4, G9: a rank receives each element it needs once, and none that it holds."""
    world = data.draw(st.permutations(range(6)))
    src_mesh = mesh(2, 2, ranks=tuple(world[:4]))
    dst_mesh = mesh(2, ranks=tuple(data.draw(st.permutations(range(6)))[:2]))
    shape = (8, 12)
    held, needed = (
        {rank: piece_of(shape, placements, on, rank).span for rank in on.ranks}
        for on, placements in (
            (src_mesh, drawn(data, "xy")),
            (dst_mesh, drawn(data, "x")),
        )
    )
    transfers = list(box_transfers(held, needed))
    for rank in dst_mesh.ranks:
        wanted, arriving, sent = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        wanted[slices(needed[rank])] = 1
        for transfer in transfers:
            inside = zip(transfer.box, held[transfer.src_rank], strict=True)
            assert all(s >= first and e <= last for (s, e), (first, last) in inside)
            if transfer.dst_rank == rank:
                arriving[slices(transfer.box)] += 1
                sent[slices(transfer.box)] += transfer.src_rank != rank
        assert torch.equal(arriving, wanted)
        if rank in held:
            wanted[slices(held[rank])] = 0
        assert torch.equal(sent, wanted)


def drawn(data, axes: str) -> Placements:
    choices = st.sampled_from(["R", "S(0)", "S(1)"])
    return Placements(tuple((axis, parse_placement(data.draw(choices))) for axis in axes))


def slices(box):
    return tuple(slice(*pair) for pair in box)
