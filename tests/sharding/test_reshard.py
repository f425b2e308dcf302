"""Layouts on meshes of any shape, and the cheapest ways between them."""

from __future__ import annotations

import itertools
import random
import threading
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.layout.layout import Layout, ProcessMesh
from planner.layout.placement import Partial, Placement, Replicate, Shard, parse_placement
from planner.layout.redistribution.reshard import Reshard, plan_reshard
from planner.runtime.stage.calls import collectives
from planner.runtime.stage.resharding import open_groups, reshard, run_reshard
from tests.sharding.ranks import on_ranks
from tests.spawn import run_ranks

SHAPE = (8, 12)


def mesh(*shape: int, ranks: tuple[int, ...] | None = None) -> ProcessMesh:
    axes = ("x", "y", "z")[: len(shape)]
    return ProcessMesh(axes=axes, shape=shape, ranks=ranks or tuple(range(prod(shape))))


def layout(on: ProcessMesh, *placements: str) -> Layout:
    return Layout(mesh=on, placements=tuple(map(parse_placement, placements)))


def every_layout(on: ProcessMesh, shape: tuple[int, ...]) -> list[Layout]:
    choices: list[Placement] = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    found = []
    for placements in itertools.product(choices, repeat=len(on.shape)):
        candidate = Layout(mesh=on, placements=placements)
        try:
            candidate.local_shape(shape)
        except LayoutError:
            continue
        found.append(candidate)
    return found


def part(whole: torch.Tensor, on: Layout, rank: int) -> torch.Tensor:
    """A rank's part. The terms of a sum are the whole plus five, minus five, and zeros."""
    box = on.box(tuple(whole.shape), rank)
    piece = whole[tuple(slice(*pair) for pair in box)].clone()
    coordinate = on.mesh.coordinate(rank)
    term = [coordinate[i] for i, p in enumerate(on.placements) if isinstance(p, Partial)]
    if not term:
        return piece
    if sum(term) == 0:
        return piece + 5.0
    is_second = term[0] == 1 and sum(term) == 1
    return torch.full_like(piece, -5.0 if is_second else 0.0)


# -- layouts -------------------------------------------------------------------------------


def test_mesh_of_any_order():
    """D1, D2: the mesh [[2, 4, 5], [0, 1, 3]] and a (4, 3) tensor, Shard(0) and Shard(1)."""
    on = layout(mesh(2, 3, ranks=(2, 4, 5, 0, 1, 3)), "S(0)", "S(1)")
    assert on.local_shape((4, 3)) == (2, 1)
    assert on.mesh.coordinate(4) == (0, 1)
    assert on.box((4, 3), 4) == ((0, 2), (1, 2))
    assert list(on.mesh.groups("x")) == [(2, 0), (4, 1), (5, 3)]
    assert list(on.mesh.groups("y")) == [(2, 4, 5), (0, 1, 3)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_local_shapes_and_offsets_tile_the_tensor(data):
    """M9: for random layouts the boxes of all ranks cover each element equally often."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = tuple(data.draw(st.lists(st.sampled_from([6, 12, 18]), min_size=1, max_size=3)))
    choices = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    on = Layout(
        mesh=mesh(*sizes), placements=tuple(data.draw(st.sampled_from(choices)) for _ in sizes)
    )
    for dim, size in enumerate(shape):
        parts = prod(sizes[axis] for axis in on.shards_of(dim))
        if size % parts:
            with pytest.raises(LayoutError, match=f"can't be sharded {parts} ways"):
                on.local_shape(shape)
            return
    local = on.local_shape(shape)
    counts = torch.zeros(shape)
    for rank in on.mesh.ranks:
        box = on.box(shape, rank)
        assert tuple(stop - start for start, stop in box) == local
        counts[tuple(slice(*pair) for pair in box)] += 1
    copies = prod(n for n, p in zip(sizes, on.placements, strict=True) if not isinstance(p, Shard))
    assert torch.all(counts == copies)


def test_unwhole_splits_are_refused_with_the_sizes_that_work():
    """M8: dim 6 on 4 ranks."""
    with pytest.raises(LayoutError, match=r"size 6 can't be sharded 4 ways.*use 1, 2, 3, 6"):
        layout(mesh(4), "S(0)").local_shape((6,))


@pytest.mark.parametrize(
    ("axes", "shape", "ranks", "message"),
    [
        (("x", "x"), (2, 2), (0, 1, 2, 3), "a name of its own"),
        (("x",), (2, 2), (0, 1, 2, 3), "each axis needs one size"),
        (("x",), (3,), (0, 1), "needs 3 different ranks; 2 given"),
        (("x",), (2,), (1, 1), "needs 2 different ranks"),
    ],
)
def test_a_mesh_that_does_not_hold_together_is_refused(axes, shape, ranks, message):
    """D1."""
    with pytest.raises(LayoutError, match=message):
        ProcessMesh(axes=axes, shape=shape, ranks=ranks)


# -- ways on one mesh ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "src", "dst", "steps"),
    [
        ((4,), "P", "R", ["all_reduce@x P->R 1152 B"]),
        ((4,), "S(0)", "S(1)", ["all_to_all@x S(0)->S(1) 144 B"]),
        ((4,), "P", "S(1)", ["reduce_scatter@x P->S(1) 576 B"]),
        ((4,), "R", "S(1)", ["slice@x R->S(1) 0 B"]),
        # The finer cut of dim 0 moves away first, then the coarser one is undone.
        ((2, 2), "S(0) S(0)", "R R", ["all_gather@y S(0)->R 192 B", "all_gather@x S(0)->R 384 B"]),
        # Undoing the coarse cut alone must go around the fine one.
        (
            (2, 2),
            "S(0) S(0)",
            "R S(0)",
            [
                "all_to_all@y S(0)->S(1) 96 B",
                "all_gather@x S(0)->R 192 B",
                "all_to_all@y S(1)->S(0) 192 B",
            ],
        ),
        # Summing scattered along x first halves what is summed along y.
        (
            (2, 2),
            "P P",
            "S(0) R",
            ["reduce_scatter@x P->S(0) 384 B", "all_reduce@y P->R 384 B"],
        ),
    ],
)
def test_the_cheapest_chain(shape, src, dst, steps):
    """M10, M11: each step with the bytes a rank receives (8 x 12 doubles are 768 bytes)."""
    on = mesh(*shape)
    way = plan_reshard(SHAPE, 8, layout(on, *src.split()), layout(on, *dst.split()))
    assert [str(step) for step in way.before] == steps


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_every_change_is_exact_forward_and_backward(shape, monkeypatch):
    """M10, M11, M13: all pairs of layouts; bytes counted equal bytes predicted."""
    on = mesh(*shape)
    layouts = every_layout(on, SHAPE)
    whole = torch.randn(SHAPE, dtype=torch.float64)
    cotangent = torch.randn(SHAPE, dtype=torch.float64)
    pairs = list(itertools.product(layouts, layouts))
    if len(shape) > 1:
        pairs = random.Random(0).sample(pairs, 60)

    received = threading.local()
    run_step = collectives.run_step

    def counting(x, group, step):
        y = run_step(x, group, step)
        received.count += bytes_received(step[0], x, y, collectives.size(group))
        return y

    def body(rank):
        groups = open_groups(on)
        for src, dst in pairs:
            way = plan_reshard(SHAPE, 8, src, dst)
            x = part(whole, src, rank).requires_grad_()
            received.count = 0.0
            y = reshard(x, way, groups)
            assert received.count == pytest.approx(way.bytes_received(rank)), way
            y.backward(part(cotangent, dst.gradient(), rank))
            expected = part(cotangent, src.gradient(), rank)
            torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-12)
            if not dst.is_partial:
                torch.testing.assert_close(y, part(whole, dst, rank), rtol=0, atol=1e-12)
            else:
                back = plan_reshard(SHAPE, 8, dst, layout(on, *("R",) * len(shape)))
                joined = reshard(y.detach(), back, groups)
                torch.testing.assert_close(joined, whole, rtol=0, atol=1e-12)

    monkeypatch.setattr(collectives, "run_step", counting)
    on_ranks(prod(shape), body)


def bytes_received(kind: str, x: torch.Tensor, y: torch.Tensor, size: int) -> float:
    """What a rank receives in a collective, counted from the tensors that go in and come out."""
    share = (size - 1) / size
    if kind == "all_reduce":
        return 2 * share * x.nbytes
    if kind == "all_gather":
        return share * y.nbytes
    if kind in ("reduce_scatter", "all_to_all"):
        return share * x.nbytes
    return 0.0


# -- between meshes ----------------------------------------------------------------------------


BETWEEN = [
    (mesh(2, ranks=(0, 1)), "R", mesh(2, ranks=(2, 3)), "S(0)"),
    (mesh(2, ranks=(0, 1)), "P", mesh(2, ranks=(2, 3)), "S(1)"),
    (mesh(2, ranks=(0, 1)), "S(0)", mesh(2, ranks=(2, 3)), "R"),
    (mesh(2, 2), "S(0) R", mesh(4, ranks=(3, 1, 0, 2)), "S(1)"),
    (mesh(2, ranks=(0, 1)), "S(1)", mesh(2, 1, ranks=(1, 2)), "S(0) R"),
    (mesh(2, ranks=(0, 1)), "S(0)", mesh(2, ranks=(2, 3)), "P"),
]


def ways_between() -> list[Reshard]:
    return [
        plan_reshard(SHAPE, 8, layout(a, *before.split()), layout(b, *after.split()))
        for a, before, b, after in BETWEEN
    ]


def run_between(ways: list[Reshard], whole: torch.Tensor):
    """On a gloo rank: bring `whole` from one mesh to the other and its gradient back."""
    rank = dist.get_rank()
    found = []
    for way in ways:
        src, dst = way.src, way.dst
        groups = [open_groups(src.mesh), open_groups(dst.mesh)]
        common = {"dtype": whole.dtype, "device": whole.device}
        x = part(whole, src, rank) if rank in src.mesh.ranks else None
        y = run_reshard(x, way, src_groups=groups[0], dst_groups=groups[1], **common)
        grad = part(2 * whole, dst.gradient(), rank) if rank in dst.mesh.ranks else None
        back = way.backward()
        x_grad = run_reshard(grad, back, src_groups=groups[1], dst_groups=groups[0], **common)
        # As arrays: a tensor's memory would have to outlive this process to be received.
        found.append([None if t is None else t.numpy() for t in (y, x_grad)])
    return found


def test_between_meshes_on_gloo():
    """D4, D12: ranks 0-1 to ranks 2-3, overlapping meshes, other shapes; values and gradients."""
    whole = torch.arange(96, dtype=torch.float64).reshape(SHAPE)
    ways = ways_between()
    by_rank = run_ranks(run_between, 4, ways, whole)
    for case, way in enumerate(ways):
        src, dst = way.src, way.dst
        results = [
            [None if a is None else torch.from_numpy(a) for a in by_rank[rank][case]]
            for rank in range(4)
        ]
        for rank in src.mesh.ranks:
            expected = part(2 * whole, src.gradient(), rank)
            torch.testing.assert_close(results[rank][1], expected, rtol=0, atol=1e-12)
        values = [results[rank][0] for rank in dst.mesh.ranks]
        if dst.is_partial:
            torch.testing.assert_close(sum(values), whole, rtol=0, atol=1e-12)
            continue
        for rank, value in zip(dst.mesh.ranks, values, strict=True):
            torch.testing.assert_close(value, part(whole, dst, rank), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_transfers_are_minimal_and_complete(data):
    """D4, G9: a rank receives each element it needs once, and none that it holds."""
    world = data.draw(st.permutations(range(6)))
    src_mesh = mesh(2, 2, ranks=tuple(world[:4]))
    dst_mesh = mesh(2, ranks=tuple(data.draw(st.permutations(range(6)))[:2]))
    choices = ["R", "S(0)", "S(1)"]
    src = layout(src_mesh, *(data.draw(st.sampled_from(choices)) for _ in range(2)))
    dst = layout(dst_mesh, data.draw(st.sampled_from(choices)))
    way = plan_reshard(SHAPE, 8, src, dst)
    for rank in dst_mesh.ranks:
        needed = torch.zeros(SHAPE)
        needed[slices(dst.box(SHAPE, rank))] = 1
        arriving = torch.zeros(SHAPE)
        for transfer in way.transfers:
            held = src.box(SHAPE, transfer.src_rank)
            inside = zip(transfer.box, held, strict=True)
            assert all(s >= first and e <= last for (s, e), (first, last) in inside)
            if transfer.dst_rank == rank:
                arriving[slices(transfer.box)] += 1
        assert torch.equal(arriving, needed)
        if rank in src_mesh.ranks:
            needed[slices(src.box(SHAPE, rank))] = 0
        assert way.bytes_received(rank) == 8 * needed.sum()


def slices(box):
    return tuple(slice(*pair) for pair in box)


def test_leaving_the_mesh_under_autograd_is_refused():
    """D4: the message says what to use instead."""
    on, other = mesh(2, ranks=(0, 1)), mesh(2, ranks=(2, 3))
    way = plan_reshard(SHAPE, 8, layout(on, "R"), layout(other, "R"))
    with pytest.raises(LayoutError, match="leaves its mesh; use run_reshard"):
        reshard(torch.zeros(SHAPE), way, {})
